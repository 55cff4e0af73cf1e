"""A run that completed a checkpoint never begins at step 0 again without a word: not if all that is left of it is a record."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.layout import WorkspaceLayout
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.manifest import LATEST, MANIFEST, RunState, rank_file
from finetune_trainer.checkpoint.state import create_state, pieces
from finetune_trainer.context import RunContext
from finetune_trainer.errors import CheckpointError
from finetune_trainer.ranks.reports import write_rank_report
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.checkpoint.saved_models import ALONE

STEPS = (11, 22)
FIRST, NEWEST = "step-0000000011", "step-0000000022"


def checkpoints(claims: Path, data_hash: str = "data", seed: int = 3) -> Checkpoints:
    """Those of one rank with a small model, as an attempt sees them when it begins."""
    context = RunContext(plan_of(tiny_spec(training={"seed": seed})), "", claims, 0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    create_state(optimizer)
    return Checkpoints(context, ALONE, data_hash, pieces(model), optimizer)


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    """With the checkpoints of a run."""
    run = checkpoints(tmp_path)
    for step in STEPS:
        run.save(step, RunState())
    assert workspace_of(tmp_path).checkpoints.joinpath(LATEST).read_text().strip() == NEWEST
    return tmp_path


def workspace_of(claims: Path) -> WorkspaceLayout:
    return RunContext(plan_of(tiny_spec()), "", claims, 0).workspace


def without(file: str) -> Callable[[Path], None]:
    """Takes a file out of every checkpoint."""

    def damage(directory: Path) -> None:
        for step in (FIRST, NEWEST):
            (directory / step / file).unlink()

    return damage


def without_directories(directory: Path) -> None:
    for step in (FIRST, NEWEST):
        shutil.rmtree(directory / step)


def under_other_names(directory: Path) -> None:
    (directory / FIRST).rename(directory / "step-0000000012")
    (directory / NEWEST).rename(directory / "step-0000000021")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without(MANIFEST), [NEWEST, FIRST, "manifest.json cannot be read"]),
        (without(rank_file(0)), [NEWEST, FIRST, "rank-00000.safetensors is missing"]),
        (under_other_names, ["step-0000000021 holds the checkpoint of step 22"]),
        (without_directories, ["latest says that the checkpoint of step 22 was complete"]),
    ],
    ids=["no manifest", "no file", "other names", "no directory"],
)
def test_progress_that_cannot_be_read_ends_the_attempt(claims: Path, damage: Callable[[Path], None], words: list[str]) -> None:
    damage(workspace_of(claims).checkpoints)
    before = sorted(claims.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        checkpoints(claims).resume()
    assert [word for word in words if word not in str(caught.value)] == []
    assert "remove" in (caught.value.hint or "")
    assert sorted(claims.rglob("*")) == before


def test_data_that_was_prepared_differently_ends_the_attempt(claims: Path) -> None:
    with pytest.raises(CheckpointError, match="was trained on data data, but other is prepared"):
        checkpoints(claims, data_hash="other").resume()
    assert checkpoints(claims).resume() is not None


@pytest.mark.parametrize(
    ("file", "line", "says"),
    [
        ("history.jsonl", {"step": 14, "loss": 1.0, "checkpoint_step": 11}, "history.jsonl says that the checkpoint of step 11"),
        ("accounts.jsonl", {"kind": "started", "step": 11, "attempt": 1}, "accounts.jsonl says that the checkpoint of step 11"),
    ],
)
def test_records_outside_of_the_directory_are_asked_too(tmp_path: Path, file: str, line: dict[str, object], says: str) -> None:
    root = workspace_of(tmp_path).root
    root.mkdir(parents=True)
    (root / file).write_text(f'{json.dumps(line)}\n{{"step": 1')
    with pytest.raises(CheckpointError, match=says):
        checkpoints(tmp_path).resume()


@pytest.mark.parametrize(
    ("report", "step"),
    [
        (TerminationReport(role="train", outcome=Outcome.FAILED, failure=FailureClass.PREEMPTED, rank=0, step=5), 5),
        (TerminationReport(role="train", outcome=Outcome.SUCCEEDED, rank=0, facts={"step": "6"}), 6),
    ],
    ids=["stopped", "at the end"],
)
def test_what_ranks_reported_when_they_ended_is_asked_too(tmp_path: Path, report: TerminationReport, step: int) -> None:
    """The only checkpoint was saved last: after it nobody wrote a line of the history."""
    write_rank_report(workspace_of(tmp_path).reports("train", 0), report)
    with pytest.raises(CheckpointError, match=f"train-0 says that the checkpoint of step {step} was complete"):
        checkpoints(tmp_path).resume()


def test_what_ranks_reported_that_failed_is_no_checkpoint(tmp_path: Path) -> None:
    for attempt, facts in enumerate(({}, {"step": "-1"}, {"step": "\u00b2"}, {"step": "9" * 5000})):
        failure = None if facts else FailureClass.COLLECTIVE
        outcome = Outcome.SUCCEEDED if facts else Outcome.FAILED
        report = TerminationReport(role="train", outcome=outcome, failure=failure, rank=0, step=5, facts=facts)
        write_rank_report(workspace_of(tmp_path).reports("train", attempt), report)
    assert checkpoints(tmp_path).resume() is None


def test_steps_before_the_first_checkpoint_are_done_again(tmp_path: Path) -> None:
    root = workspace_of(tmp_path).root
    root.mkdir(parents=True)
    (root / "history.jsonl").write_text('{"step": 0}\n{"step": 1, "loss": 1.0}\n{"step": 2, "checkpoint_step": 0}\n')
    (root / "accounts.jsonl").write_text('{"kind": "started", "step": 0}\n{"kind": "spent", "step": 2, "seconds": {}}\n')
    assert checkpoints(tmp_path).resume() is None


def test_a_run_that_learns_something_else_begins_although_another_left_its_records(claims: Path) -> None:
    (workspace_of(claims).root / "history.jsonl").write_text('{"step": 23, "checkpoint_step": 22}\n')
    assert checkpoints(claims, seed=4).resume() is None


def test_the_checkpoint_of_another_run_explains_no_later_step(claims: Path) -> None:
    (workspace_of(claims).root / "history.jsonl").write_text('{"step": 24, "checkpoint_step": 23}\n')
    with pytest.raises(CheckpointError, match=r"history\.jsonl says that the checkpoint of step 23 was complete"):
        checkpoints(claims, seed=4).resume()


@pytest.mark.parametrize("remove", [lambda newest: (newest / MANIFEST).unlink(), shutil.rmtree], ids=["damaged", "absent"])
def test_the_one_before_is_used_and_said_if_only_the_newest_is_missing(
    claims: Path, remove: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    remove(workspace_of(claims).checkpoints / NEWEST)
    manifest = checkpoints(claims).resume()
    assert manifest is not None
    assert manifest.step == STEPS[0]
    assert (
        "latest says that the checkpoint of step 22 was complete, but it is missing or damaged: "
        "the steps after 11 are trained again"
    ) in caplog.messages


def test_a_whole_resume_says_nothing_of_lost_steps(claims: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoints(claims).resume() is not None
    assert caplog.messages == []


def test_records_that_cannot_be_read_are_no_reason_not_to_resume(claims: Path, caplog: pytest.LogCaptureFixture) -> None:
    latest = workspace_of(claims).checkpoints / LATEST
    latest.unlink()
    latest.mkdir()
    manifest = checkpoints(claims).resume()
    assert manifest is not None
    assert manifest.step == STEPS[1]
    (said,) = caplog.messages
    assert said.startswith("it is unknown whether steps after 22 were saved: ")


def test_a_later_checkpoint_of_another_run_is_no_lost_step(claims: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints(claims, seed=4).save(33, RunState())
    manifest = checkpoints(claims).resume()
    assert manifest is not None
    assert manifest.step == STEPS[1]
    assert [message for message in caplog.messages if "trained again" in message] == []
