"""Matches a name in the settings of an adapter to modules and parameters of a model by PEFT's rules, from names alone.

A list is matched by the end of names, a text instead of a list as a regular expression, the key of a pattern by an expression
that PEFT makes of it, modulesToSave by any end at all, and layers by their numbers. module_names.py uses this to report names
that match nothing; adapter_names.py and attached.py use it to see what PEFT made of the names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from finetune_job.api.method import ALL_LINEAR
from finetune_job.module_expressions import key_expression
from finetune_trainer.preflight.expressions import compiled_or_none

LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""How PEFT finds a module's layer number: the first part of its name that is a number."""


def targets(name: str, module: str) -> bool:
    """Whether a name of a list means the module or parameter: its whole name or its last parts."""
    return module == name or module.endswith(f".{name}")


def pattern_matches(pattern: str, modules: Iterable[str]) -> bool:
    """Whether a key of a pattern means one of these modules or parameters (peft.utils.other.get_pattern_key)."""
    compiled = compiled_or_none(key_expression(pattern))
    return compiled is not None and any(compiled.match(module) for module in modules)


def is_target(name: str, modules: Iterable[str]) -> bool:
    """Whether a name of targetModules or a similar list means one of these modules; all-linear always does."""
    return name == ALL_LINEAR or any(targets(name, module) for module in modules)


def is_saved(name: str, modules: Iterable[str]) -> bool:
    """Whether a name of modulesToSave means one of these modules: it may be any end of a module's name."""
    return any(module.endswith(name) for module in modules)


def is_inside(saved: str, module: str) -> bool:
    """Whether `module` is the module of this name or is inside it."""
    return f".{saved}." in f".{module}."


def is_expression_for(text: str, modules: Iterable[str]) -> bool:
    """Whether a text instead of a list matches a module's whole name, as PEFT reads it."""
    if text.lower() == ALL_LINEAR:
        return True
    compiled = compiled_or_none(text)
    return compiled is not None and any(compiled.fullmatch(module) for module in modules)


def layer_numbers(patterns: Collection[Any], modules: Collection[str]) -> set[int]:
    """Returns the numbers that PEFT finds in names of modules: behind the first matching pattern, or behind any part."""
    if not patterns:
        return {int(found.group(1)) for module in modules if (found := LAYER.match(module))}
    compiled = [compiled_or_none(rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\.") for pattern in patterns]
    if None in compiled:
        return set()
    behind = (next((found for each in compiled if each and (found := each.match(module))), None) for module in modules)
    return {int(found["number"]) for found in behind if found}
