"""The fix of a finding, as a program makes it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

from finetune_job.rules.define import shown
from finetune_job.rules.rule import FieldChange


def changes_text(changes: Iterable[FieldChange]) -> str:
    """In one line, as in "spec.data.packing: false, spec.training.epochs removed"."""
    return ", ".join(
        f"{change.field} removed" if change.value is None else f"{change.field}: {_written(change.value)}" for change in changes
    )


_NO_TEXT = re.compile(r"[-+.]?[0-9].*|true|false|yes|no|on|off|null|~|", re.IGNORECASE)
"""Words that YAML reads as something else where they have no quotes, and some more."""


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) and _NO_TEXT.fullmatch(value) else shown(value)


def with_changes(document: dict[str, Any], changes: Iterable[FieldChange]) -> dict[str, Any]:
    """A copy of an object with the changes made. What stands in the way of a path that leads on is replaced by a mapping."""
    changed = copy.deepcopy(document)
    for change in changes:
        *parents, last = change.field.split(".")
        place = changed
        for part in parents:
            if not isinstance(place.get(part), dict):
                if change.value is None:
                    break
                place[part] = {}
            place = place[part]
        else:
            if change.value is None:
                place.pop(last, None)
            else:
                place[last] = copy.deepcopy(change.value)
    return changed
