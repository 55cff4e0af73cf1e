"""Matches names in an adapter's settings with names of modules and parameters of a model, by PEFT's rules.

An element of a list matches the last parts of a name. A string instead of a list is a regular expression. PEFT turns a key of a
pattern into an expression. An element of modulesToSave matches any end of a name, even within a part. Layers are matched by their
numbers. module_names.py uses this to report names that match nothing, adapter_names.py and attached.py to know what PEFT does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from finetune_job.api.method import ALL_LINEAR
from finetune_job.module_expressions import key_expression
from finetune_trainer.preflight.expressions import compiled_or_none

LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""How PEFT finds a module's layer number: the first number in its name after two or more parts."""


def targets(name: str, module: str) -> bool:
    """Whether an element of a list matches the module or parameter, that is, equals its whole name or its last parts."""
    return module == name or module.endswith(f".{name}")


def pattern_matches(pattern: str, modules: Iterable[str]) -> bool:
    """Whether the key of a pattern matches one of these modules or parameters (peft.utils.other.get_pattern_key)."""
    compiled = compiled_or_none(key_expression(pattern))
    return compiled is not None and any(compiled.match(module) for module in modules)


def is_target(name: str, modules: Iterable[str]) -> bool:
    """Whether an element of targetModules or a similar list matches one of these modules; all-linear always does."""
    return name == ALL_LINEAR or any(targets(name, module) for module in modules)


def is_saved(name: str, modules: Iterable[str]) -> bool:
    """Whether an element of modulesToSave matches one of these modules: it may be any end of a module's name."""
    return any(module.endswith(name) for module in modules)


def is_inside(saved: str, module: str) -> bool:
    """Whether `module` is named `saved`, or is inside such a module."""
    return f".{saved}." in f".{module}."


def is_expression_for(text: str, modules: Iterable[str]) -> bool:
    """Whether a string instead of a list matches the whole name of a module, by PEFT's rules."""
    if text.lower() == ALL_LINEAR:
        return True
    compiled = compiled_or_none(text)
    return compiled is not None and any(compiled.fullmatch(module) for module in modules)


def layer_numbers(patterns: Collection[Any], modules: Collection[str]) -> set[int]:
    """Returns the layer numbers that PEFT finds in names of modules: after the first pattern that matches, or after any part."""
    if not patterns:
        return {int(match.group(1)) for module in modules if (match := LAYER.match(module))}
    compiled = [compiled_or_none(rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\.") for pattern in patterns]
    if None in compiled:
        return set()
    behind = (next((match for pattern in compiled if pattern and (match := pattern.match(module))), None) for module in modules)
    return {int(match["number"]) for match in behind if match}
