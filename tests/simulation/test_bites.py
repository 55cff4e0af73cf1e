"""The simulation notices an operator that is broken: each test breaks one thing and waits for the complaint about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest

from finetune_operator.cluster.api import Api
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.kinds import Kind
from finetune_operator.decide import reconcile, role_stage, validate_stage
from finetune_operator.decide.draft import Draft
from finetune_operator.worker import Worker
from tests.simulation.walk import walk

WALKS = 25
STEPS = 120
_request, _delete, _condition, _freeze = Api.request, Api.delete, Draft.condition, validate_stage._freeze


async def _delete_without_precondition(self: Api, kind: Kind, namespace: str, name: str, **options: Any) -> Any:
    return await _delete(self, kind, namespace, name, **{**options, "uid": ""})


async def _delete_and_orphan(self: Api, method: str, path: str, query: Any = None, **options: Any) -> Any:
    if method == "DELETE":
        options["body"] = {**options["body"], "propagationPolicy": "Orphan"}
    return await _request(self, method, path, query, **options)


def _always_at_once(self: Worker, key: Any, outcome: Any) -> Any:
    self.queue.add(key)
    return outcome


def _freeze_again(observed: Any, draft: Draft, *arguments: Any) -> None:
    _freeze(observed, draft, *arguments)
    draft.set(start_time=(draft.now + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ"))


BREAKS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "a delete without a precondition": (
        "deleted without a precondition",
        lambda: patch.object(Api, "delete", _delete_without_precondition),
    ),
    "a delete that orphans": ("deleted without its pods", lambda: patch.object(Api, "request", _delete_and_orphan)),
    "no look at what really runs": (
        "two live gangs|is created while",
        lambda: patch.object(role_stage, "left_of_earlier_attempts", lambda *_: ""),
    ),
    "passes without a pause": ("spin", lambda: patch.object(Worker, "_settle", _always_at_once)),
    "a job that never ends": (
        "after the end|changed after|a new attempt|although .* is True|spin|moved",
        lambda: patch.object(reconcile, "is_terminal", lambda _: False),
    ),
    "a start that is written twice": ("the start is written once", lambda: patch.object(validate_stage, "_freeze", _freeze_again)),
    "events that are not heard": (
        "no rest|does not say so|has not ended|no status",
        lambda: patch.object(Cache, "apply", lambda *_: set()),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_operator_is_noticed(name: str) -> None:
    complaint, broken = BREAKS[name]
    others = []
    with broken():
        for seed in range(WALKS):
            outcome = walk(seed, range(STEPS))
            if re.search(complaint, outcome.error):
                return
            others.append(outcome.error)
    raise AssertionError(f"{WALKS} walks, and nobody complained of {complaint!r}, but of {sorted(set(others))}")
