"""The simulation notices an operator that is broken: each test breaks one thing and waits for the complaint about it."""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from unittest.mock import patch

import pytest

from finetune_job.failures import FailureClass
from finetune_job.reasons import Reason
from finetune_operator.cache.cache import Cache
from finetune_operator.children.train_job import train_job
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import Kind
from finetune_operator.decide import reconcile
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.failures.classify import Failure
from finetune_operator.decide.failures.restart_policy import POLICY, RestartDecision, Retry
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.stages import finish, preparation_stages, role_stage, train_stage
from finetune_operator.decide.stages.finish import finish_failed
from finetune_operator.decide.stages.role_stage import RoleStage
from finetune_operator.passes import worker
from finetune_operator.passes.worker import Worker
from tests.simulation.walk import walk

pytestmark = pytest.mark.nightly
WALKS = 25
STEPS = 120
_request, _delete, _reconcile = Api.request, Api.delete, worker.reconcile
_numbers = itertools.count()


async def _delete_without_precondition(self: Api, kind: Kind, namespace: str, name: str, **options: Any) -> Any:
    return await _delete(self, kind, namespace, name, **{**options, "uid": ""})


async def _delete_and_orphan(self: Api, method: str, path: str, query: Any = None, **options: Any) -> Any:
    if method == "DELETE":
        options["body"] = {**options["body"], "propagationPolicy": "Orphan"}
    return await _request(self, method, path, query, **options)


def _always_at_once(self: Worker, key: Any, outcome: Any) -> Any:
    self.queue.add(key)
    return outcome


def _always_failed(self: RoleStage, failure: Failure, *_: Any) -> None:
    finish_failed(self.observed, self.result, Reason.FAILED, failure.text)


def _with_other_words_each_time(observed: Observed, now: datetime) -> Actions:
    actions = _reconcile(observed, now)
    status = actions.status or observed.job.status
    if not status.conditions:
        return actions
    first, *others = status.conditions
    said = first.model_copy(update={"message": f"{first.message} {next(_numbers)}"})
    return replace(actions, status=status.model_copy(update={"conditions": [said, *others]}))


COUNTED_EVICTIONS = {FailureClass.INFRASTRUCTURE: replace(POLICY[FailureClass.INFRASTRUCTURE], retry=Retry.COUNTED)}
BREAKS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "a delete without a precondition": (
        "deleted without a precondition",
        lambda: patch.object(Api, "delete", _delete_without_precondition),
    ),
    "a delete that orphans": ("deleted without its pods", lambda: patch.object(Api, "request", _delete_and_orphan)),
    "no look at what really runs": (
        "two live gangs|is created while",
        lambda: patch.object(role_stage, "delete_leftovers", lambda *_: None),
    ),
    "passes without a pause": ("spin", lambda: patch.object(Worker, "_settle", _always_at_once)),
    "a status that is worded again at each look": (
        "mere words",
        lambda: patch.object(worker, "reconcile", _with_other_words_each_time),
    ),
    "a job that never ends": (
        "after the end|changed after|a new attempt|although .* is True|spin|moved",
        lambda: patch.multiple(reconcile, is_terminal=lambda _: False, is_ended=lambda _: False),
    ),
    "restarts without a budget": (
        "counted restarts",
        lambda: patch.object(role_stage, "restart_decision", lambda *_, **__: RestartDecision.RESTART_COUNTED),
    ),
    "an eviction that is counted": (
        "nothing failed by its own fault|without a fault of its own",
        lambda: patch.dict(POLICY, COUNTED_EVICTIONS),
    ),
    "a later role that ends the job": ("trained, and ended with Failed", lambda: patch.object(RoleStage, "fail", _always_failed)),
    "an end that leaves what runs": (
        "Finished while these can run",
        lambda: patch.multiple(finish, stop_running=lambda *_: None, still_running=lambda _: ""),
    ),
    "training that a queue may admit before preflight has passed": (
        "created without a gate|before Prepared is True",
        lambda: patch.object(preparation_stages, "gated_train_job", train_job),
    ),
    "a gang with a node too many": (
        "are allowed, status",
        lambda: patch.object(train_stage, "train_job", lambda run, number, nodes, _: train_job(run, number, nodes + 1)),
    ),
    "a gate that nobody takes off": ("no rest|has not ended", lambda: patch.object(PassResult, "ungate", lambda *_: None)),
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
