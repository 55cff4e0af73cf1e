"""First values that are computed from the base's weights: by preflight, in a file of the run, unless they would take hours."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from finetune_job.failures import Outcome
from finetune_trainer.files import file_sha256
from finetune_trainer.preflight import model_process, stored_weights
from finetune_trainer.preflight.model_process import ModelCheckError, ModelCheckKilledError, computed_first_values
from finetune_trainer.preflight.stored_weights import decomposition_seconds
from finetune_trainer.processes.child import ChildEnd
from finetune_trainer.roles.preflight import run

INIT = "method.lora.initLoraWeights"


def test_what_takes_hours_to_decompose_is_refused(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "LONGEST_DECOMPOSITION_SECONDS", 0.0)
    job = context({INIT: "pissa"})
    (finding,) = run(job).findings
    assert (finding.rule, finding.field, finding.value) == ("decomposition-too-long", f"spec.{INIT}", "pissa")
    assert [(change.field, change.value) for change in finding.changes] == [(f"spec.{INIT}", "pissa_niter_16")]
    assert not job.workspace.first_values.exists()
    done = run(context({INIT: "pissa_niter_16"}))
    assert done.outcome is Outcome.SUCCEEDED
    assert done.facts["first_values_sha256"] == file_sha256(job.workspace.first_values)


def test_time_grows_with_the_larger_side_and_the_square_of_the_smaller_one() -> None:
    square = decomposition_seconds([(4096, 4096)], 1)
    assert square == pytest.approx(27.5, rel=0.01)
    assert decomposition_seconds([(4096, 14336), (14336, 4096)], 2) == pytest.approx(3.5 * square)
    assert decomposition_seconds([(1024, 4096)], 1) == pytest.approx(square / 16)


def test_a_process_without_torch_lets_another_one_compute_them(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = context({INIT: "olora"})
    monkeypatch.setattr(model_process, "torch_is_here", lambda: False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert computed_first_values(job) == file_sha256(job.workspace.first_values)


@pytest.mark.parametrize(("code", "raised"), [(1, ModelCheckError), (-9, ModelCheckKilledError)])
def test_a_process_that_fails_says_why(
    context: Any, monkeypatch: pytest.MonkeyPatch, code: int, raised: type[ModelCheckError]
) -> None:
    monkeypatch.setattr(model_process, "torch_is_here", lambda: False)
    monkeypatch.setattr(model_process, "start_answering", lambda *_: None)
    monkeypatch.setattr(model_process, "wait_for_answer", lambda *_: ChildEnd(code, b""))
    with pytest.raises(raised, match="decomposes the base's weights") as problem:
        computed_first_values(context({INIT: "olora"}))
    assert type(problem.value) is raised
