"""The fix of a finding, as a program makes it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from finetune_job.rules.define import shown
from finetune_job.rules.rule import FieldChange


def changes_text(changes: Iterable[FieldChange]) -> str:
    """In one line, as in "spec.data.packing: false, spec.training.epochs removed"."""
    return ", ".join(
        f"{change.field} removed" if change.value is None else f"{change.field}: {shown(change.value)}" for change in changes
    )


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
