"""The spec of a job that has started, though the present release would not take it from a user.

A release may bound what an earlier one took. A job that has started follows its plan, and of its spec nothing is read any more but
`run` and the names of claims: what this release refuses elsewhere must not stop it.
"""

from __future__ import annotations

import copy
from typing import Any

from pydantic import ValidationError

from finetune_job.api.job import FineTuneJobSpec

ROUNDS = 8
"""Removing one part may show what is wrong with another."""


def spec_of_started_job(content: Any) -> FineTuneJobSpec | None:
    """The spec without the parts that cannot be read; None if that leaves nothing to go by."""
    content = copy.deepcopy(content)
    for _ in range(ROUNDS):
        try:
            return FineTuneJobSpec.model_validate(content)
        except ValidationError as error:
            refused = [item["loc"] for item in error.errors(include_url=False, include_context=False, include_input=False)]
        # From the end, so that numbers of list items stay right.
        removed = [_remove(content, path) for path in reversed(refused)]
        if not any(removed):
            return None
    return None


def _remove(content: Any, path: tuple[int | str, ...]) -> bool:
    """Remove what the path leads to, or the last part on the way that is there. False: not even the first is."""
    found = None
    for name in path:
        is_there = name in content if isinstance(content, dict) else isinstance(content, list) and name in range(len(content))
        if not is_there:
            break
        found, content = (content, name), content[name]
    if found is None:
        return False
    holder, name = found
    del holder[name]
    return True
