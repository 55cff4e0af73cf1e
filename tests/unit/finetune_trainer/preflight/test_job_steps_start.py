"""The checkpoint that a job is to begin with, as preflight looks at it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_job.plan.run_plan import AddedTokenPlan
from finetune_trainer.checkpoint.manifest import MANIFEST
from finetune_trainer.preflight.inspection import Inspection
from finetune_trainer.preflight.job_steps import check_start
from tests.support.tiny_model import run_context, tiny_spec
from tests.unit.finetune_trainer.checkpoint.test_checkpoints import STATE, OneRank

STEP = 7
PLACE = "other/checkpoints/step-0000000007"


def started(
    tmp_path: Path, place: str = PLACE, **changes: dict[str, Any]
) -> tuple[OneRank, Inspection, dict[str, tuple[int, ...]]]:
    """A run with a checkpoint, and a job that is to begin with it, on the same claim."""
    other = OneRank(tmp_path / "made", **changes)
    other.checkpoints.save(STEP, STATE)
    context = run_context(tmp_path, tiny_spec(training={"startFrom": place}))
    root = context.claims_root / context.plan.workspace.claim
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "other").exists():
        (root / "other").mkdir()
        other.context.workspace.checkpoints.rename(root / "other" / "checkpoints")
    trained = {name: tuple(parameter.shape) for name, parameter in other.model.named_parameters() if parameter.requires_grad}
    structure: Any = SimpleNamespace(trainable=trained, batches=())
    return other, Inspection(context, structure=structure), trained


def directory_of(seen: Inspection) -> Path:
    return seen.context.claims_root / seen.context.plan.workspace.claim / PLACE


def test_a_whole_checkpoint_of_the_same_parameters_is_accepted(tmp_path: Path) -> None:
    _, seen, _ = started(tmp_path)
    assert list(check_start(seen)) == []


def test_a_checkpoint_that_is_gone_is_not_missed_once_the_job_has_its_own(tmp_path: Path) -> None:
    _, seen, _ = started(tmp_path)
    shutil.rmtree(directory_of(seen))
    assert [finding.rule for finding in check_start(seen)] == ["start-not-usable"]
    (seen.context.workspace.checkpoints / "step-0000000001").mkdir(parents=True)
    assert list(check_start(seen)) == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("missing", "manifest.json: cannot be read"),
        ("changed", "has sha256"),
        ("cut", "bytes,"),
        ("other name", "is of another model or method: it holds"),
        ("other shape", "is of another model or rank:"),
        ("link", "is a link to"),
    ],
)
def test_a_checkpoint_that_cannot_be_started_from_is_refused(tmp_path: Path, fault: str, expected: str) -> None:
    _, seen, trained = started(tmp_path)
    directory, name = directory_of(seen), next(iter(trained))
    file = next(path for path in directory.iterdir() if path.name != MANIFEST)
    if fault == "missing":
        (directory / MANIFEST).unlink()
    elif fault == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif fault == "other name":
        trained[f"{name}.other"] = trained.pop(name)
    elif fault == "other shape":
        trained[name] = (*trained[name], 1)
    else:
        outside = tmp_path / "outside"
        directory.parent.rename(outside)
        directory.parent.symlink_to(outside, target_is_directory=True)
    (finding,) = check_start(seen)
    assert (finding.rule, finding.severity, finding.field) == ("start-not-usable", "error", "spec.training.startFrom")
    assert finding.value == PLACE
    assert expected in finding.message
    assert "same base model and method" in finding.fix


@pytest.mark.parametrize(
    ("there", "here", "is_taken"),
    [(["<a>", "<b>"], ["<a>", "<b>"], True), (["<b>", "<a>"], ["<a>", "<b>"], False), (["<a>"], [], False), ([], ["<a>"], False)],
)
def test_rows_of_added_tokens_keep_their_meaning(tmp_path: Path, there: list[str], here: list[str], is_taken: bool) -> None:
    """Rows have the same shapes whatever their tokens are."""
    _, seen, _ = started(tmp_path, **({"model": {"addedTokens": [{"content": each} for each in there]}} if there else {}))
    origin = json.loads((directory_of(seen) / MANIFEST).read_text())["origin"]
    assert origin.get("added_tokens", []) == there
    assert ("added_tokens" in origin) is bool(there), "releases that knew none read what they would have written themselves"
    tokens = tuple(AddedTokenPlan(content=each) for each in here)
    model = seen.context.plan.model.model_copy(update={"added_tokens": tokens})
    seen = replace(seen, context=replace(seen.context, plan=seen.context.plan.model_copy(update={"model": model})))
    problems = [finding.message for finding in check_start(seen)]
    assert (problems == []) is is_taken
    assert is_taken or "holds rows of other added tokens, or in another order" in problems[0]
