"""SIGTERM at any moment of a run: the state is saved or the run ends well, and the next attempt continues from there."""

import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from finetune_job.failures import EXIT_CODES, FailureClass
from tests.support.forked_ranks import Fault, run_gang, trained_files
from tests.support.tiny_model import run_context, tiny_spec

PREEMPTED = EXIT_CODES[FailureClass.PREEMPTED]
SPEC: dict[str, Any] = {"evaluation": {"everySteps": 2}, "checkpoint": {"everySteps": 3, "asynchronous": True}}


def at(function: str, call: int = 1, rank: int = 1) -> Fault:
    return Fault(function, call=call, rank=rank, signal=signal.SIGTERM)


MOMENTS: dict[str, list[Fault]] = {
    "while the model is loaded": [at("train.run:build")],
    "in an evaluation between steps": [at("train.run:held_out_loss", call=2)],
    "twice in a row on both ranks": [
        at("train.step:seed_forward_pass", 5, 0),
        at("train.step:seed_forward_pass", 6, 0),
        at("train.step:seed_forward_pass", 5),
        at("train.step:optimizer_step", 3),
    ],
}
"""The kill suite sends SIGTERM at others."""


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@cache
def undisturbed(claims: Path) -> dict[str, bytes]:
    context = run_context(claims, tiny_spec(**SPEC))
    assert run_gang(context) == [0, 0]
    return trained_files(context)


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_is_answered_with_a_saved_state(claims: Path, tmp_path: Path, moment: str) -> None:
    expected = undisturbed(claims)
    context = run_context(tmp_path, tiny_spec(**SPEC))
    assert run_gang(context, MOMENTS[moment]) == [PREEMPTED, PREEMPTED]
    assert (context.workspace.checkpoints / "latest").is_file()
    assert not context.workspace.adapter.exists()
    assert run_gang(context) == [0, 0]
    assert trained_files(context) == expected


@pytest.mark.parametrize("fault", [at("train.run:export", rank=0), at("train.run:held_out_loss", call=4)], ids=str)
def test_sigterm_after_the_last_step_does_not_stop_the_export(claims: Path, tmp_path: Path, fault: Fault) -> None:
    context = run_context(tmp_path, tiny_spec(**SPEC))
    assert run_gang(context, [fault]) == [0, 0]
    assert trained_files(context) == undisturbed(claims)
