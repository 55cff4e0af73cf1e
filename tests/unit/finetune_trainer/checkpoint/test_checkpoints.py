"""When checkpoints are made, next to the training loop or in it, and what happens when one cannot be written."""

import errno
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.layout import checkpoint_name, checkpoint_step
from finetune_trainer.checkpoint import checkpoints as module
from finetune_trainer.checkpoint import save as save_module
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.load import full_parameters
from finetune_trainer.checkpoint.manifest import LATEST, RunState, rank_file
from finetune_trainer.checkpoint.retention import checkpoint_directories
from finetune_trainer.checkpoint.save import Snapshot, write_rank_file
from finetune_trainer.checkpoint.state import create_state, pieces
from finetune_trainer.context import RunContext
from finetune_trainer.errors import CheckpointError, SaveError
from finetune_trainer.files import file_sha256
from finetune_trainer.ranks.gang import Gang
from tests.support.forked_ranks import run_gang, trained_files, wrap
from tests.support.tiny_model import plan_of, run_context, tiny_spec, write_tiny_llama

ALONE = Gang(0, 1, 0, torch.device("cpu"), None)
STATE = RunState()


class OneRank:
    """Checkpoints of a small model, without a training loop."""

    def __init__(self, root: Path, *, first_values: str | None = None, with_base: bool = False, **changes: Any) -> None:
        self.context = RunContext(plan_of(tiny_spec(**changes)), "", root, 0)
        if with_base:
            write_tiny_llama(self.context.source_model)
        self.model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(self.model.parameters())
        create_state(optimizer)
        self.checkpoints = Checkpoints(self.context, ALONE, "data", pieces(self.model), optimizer, first_values=first_values)

    @property
    def steps(self) -> list[int | None]:
        return [checkpoint_step(path.name) for path in checkpoint_directories(self.context.workspace.checkpoints)]

    @property
    def leftovers(self) -> list[Path]:
        return list(self.context.workspace.checkpoints.glob("*.tmp-*"))

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)


def test_steps_and_seconds_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    run = OneRank(tmp_path, checkpoint={"everySteps": 10, "everySeconds": 60})
    assert [run.checkpoints.due(step) for step in (9, 10, 11)] == [False, True, False]
    now[0] += 60
    assert run.checkpoints.due(12)
    run.checkpoints.save(12, STATE)
    now[0] += 59
    assert not run.checkpoints.due(13)
    by_steps = OneRank(tmp_path, checkpoint={"everySteps": 10})
    now[0] += 10_000
    assert not by_steps.checkpoints.due(13, interval_for_losses=5.0), "the plan's interval is fixed"


def test_losses_make_an_adaptive_interval_shorter_and_never_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    run = OneRank(tmp_path, checkpoint={"everySteps": 10, "everySeconds": 60, "adaptive": True})
    now[0] += 20
    assert not run.checkpoints.due(1)
    assert not run.checkpoints.due(1, interval_for_losses=20.5)
    assert run.checkpoints.due(1, interval_for_losses=20.0)
    assert run.checkpoints.due(10, interval_for_losses=500.0)
    now[0] += 40
    assert run.checkpoints.due(2, interval_for_losses=500.0)
    only_losses = OneRank(tmp_path, checkpoint={"everySteps": 1000, "adaptive": True})
    now[0] += 30
    assert only_losses.checkpoints.due(3, interval_for_losses=30.0)
    assert not only_losses.checkpoints.due(3)


def test_the_best_is_kept_and_exported(tmp_path: Path) -> None:
    run = OneRank(tmp_path, evaluation={"everySteps": 1, "loadBestModelAtEnd": True})
    for step in (1, 2, 3, 4, 5):
        run.fill(step)
        run.checkpoints.save(step, STATE, is_best=step == 2)
    assert run.steps == [5, 4, 2]
    again = OneRank(tmp_path, evaluation={"everySteps": 1, "loadBestModelAtEnd": True})
    resumed = again.checkpoints.resume()
    assert resumed is not None
    assert resumed.step == 5
    for each in (run, again):
        found = each.checkpoints.finished()
        assert found is not None
        assert found[1].step == 2
        assert float(dict(full_parameters(*found))["bias"][0]) == 2
    path = run.context.workspace.checkpoints / checkpoint_name(2) / rank_file(0)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="the best checkpoint cannot be used"):
        again.checkpoints.finished()


def test_the_newest_is_exported_where_nobody_asks_for_the_best(tmp_path: Path) -> None:
    run = OneRank(tmp_path)
    for step in (1, 2, 3, 4):
        run.checkpoints.save(step, STATE, is_best=step == 1)
    assert run.steps == [4, 3]
    found = run.checkpoints.finished()
    assert found is not None
    assert found[1].step == 4


class Gate:
    """Holds writing back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        monkeypatch.setattr(save_module, "write_rank_file", self._write)

    def _write(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(60)
        return write_rank_file(*arguments)


def test_an_asynchronous_save_holds_what_was_at_the_step_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OneRank(tmp_path, checkpoint={"everySteps": 2, "asynchronous": True})
    gate = Gate(monkeypatch)
    run.fill(2)
    run.checkpoints.save(2, STATE)
    assert gate.entered.wait(60)
    run.fill(3)
    assert not run.checkpoints.due(3)
    assert run.checkpoints.complete_step() is None
    assert run.steps == []
    gate.opened.set()
    run.checkpoints.wait()
    assert run.checkpoints.complete_step() == 2
    run.fill(4)
    run.checkpoints.save(4, STATE)
    run.fill(5)
    found = run.checkpoints.finished()
    assert found is not None
    assert {float(tensor.flatten()[0]) for _, tensor in full_parameters(*found)} == {4.0}
    assert run.steps == [4, 2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_an_asynchronous_save_takes_memory_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    run = OneRank(tmp_path, checkpoint={"everySteps": 2, "asynchronous": asynchronous})
    written: list[Snapshot] = []
    monkeypatch.setattr(save_module, "write_rank_file", lambda path, taken: written.append(taken) or write_rank_file(path, taken))
    run.fill(2)
    save_and_wait(run, 2)
    (taken,) = written
    trained = {parameter.untyped_storage().data_ptr() for parameter in run.model.parameters()}
    in_file = {tensor.untyped_storage().data_ptr() for tensor in taken.tensors.values()}
    assert trained.isdisjoint(in_file) is asynchronous
    found = run.checkpoints.finished()
    assert found is not None
    assert {float(tensor.flatten()[0]) for _, tensor in full_parameters(*found)} == {2.0}


def test_a_written_asynchronous_save_is_completed_at_the_next_step_boundary(tmp_path: Path) -> None:
    run = OneRank(tmp_path, checkpoint={"everySteps": 2, "asynchronous": True})
    run.checkpoints.save(2, STATE)
    assert run.checkpoints.complete_step() is None
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(60)
    assert not run.checkpoints.due(3)
    assert run.checkpoints.complete_step() == 2


def test_the_last_save_is_waited_for(tmp_path: Path) -> None:
    run = OneRank(tmp_path, checkpoint={"everySteps": 2, "asynchronous": True})
    run.checkpoints.save(2, STATE)
    run.checkpoints.save(3, STATE, is_last=True)
    assert run.checkpoints.complete_step() == 3
    assert run.steps == [3, 2]


def save_and_wait(run: OneRank, step: int) -> None:
    run.checkpoints.save(step, STATE)
    run.checkpoints.wait()


def full_disk(*_arguments: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_harms_nothing_and_two_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    run = OneRank(tmp_path, checkpoint={"everySteps": 1, "asynchronous": asynchronous})
    run.checkpoints.save(1, STATE)
    run.checkpoints.wait()
    for step in (2, 4):
        with monkeypatch.context() as patch:
            patch.setattr(save_module, "write_rank_file", full_disk)
            run.checkpoints.save(step, STATE)
            run.checkpoints.wait()
        assert run.checkpoints.complete_step() == step - 1
        run.checkpoints.save(step + 1, STATE)
        run.checkpoints.wait()
        assert run.checkpoints.complete_step() == step + 1
    assert run.checkpoints.failed_saves == 2
    assert "No space left on device" in caplog.text
    monkeypatch.setattr(save_module, "write_rank_file", full_disk)
    run.checkpoints.save(6, STATE)
    with pytest.raises(SaveError, match=r"step [67]: rank 0"):
        # An asynchronous save says so when it is completed.
        save_and_wait(run, 7)
    assert run.steps == [5, 3]
    assert not run.leftovers


@pytest.mark.parametrize(
    ("number", "failure", "advice"),
    [
        (errno.ENOSPC, FailureClass.DISK_FULL, "make room"),
        (errno.EDQUOT, FailureClass.DISK_FULL, "make room"),
        (errno.EFBIG, FailureClass.DISK_FULL, "make room"),
        (errno.EROFS, FailureClass.INTERNAL, "is mounted"),
        (errno.EACCES, FailureClass.INTERNAL, "is mounted"),
        (errno.EIO, FailureClass.INTERNAL, "look at the storage"),
    ],
)
@pytest.mark.parametrize("place", ["write_rank_file", "publish_directory"])
def test_only_a_lack_of_room_is_called_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: int, failure: FailureClass, advice: str
) -> None:
    def broken(*_arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(save_module, place, broken)
    with pytest.raises(SaveError) as caught:
        OneRank(tmp_path).checkpoints.save(1, STATE, is_last=True)
    assert caught.value.failure is failure
    assert advice in caught.value.hint
    assert "older checkpoints are unharmed" in caught.value.hint


@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096])
def test_a_file_that_is_written_in_chunks_has_all_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(save_module, "_CHUNK_BYTES", chunk_bytes)
    tensors = {"param/a": torch.arange(5.0), "param/b": torch.arange(3, dtype=torch.bfloat16), "step/a": torch.tensor([7.0])}
    entry = write_rank_file(tmp_path / "file", Snapshot(tensors, ()))
    assert (entry.size, entry.sha256) == ((tmp_path / "file").stat().st_size, file_sha256(tmp_path / "file"))
    found = load_file(tmp_path / "file")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


@dataclass(frozen=True)
class SmallFiles:
    """From the `first`-th to the `last`-th write of a checkpoint on, files of one rank cannot grow beyond a few bytes."""

    rank: int
    first: int
    last: int

    def arm(self, rank: int) -> None:
        calls = [0]

        def limited(original: Callable[..., Any], *arguments: Any) -> Any:
            calls[0] += 1
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if self.first <= calls[0] <= self.last:
                resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
            try:
                return original(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        if rank == self.rank:
            wrap("checkpoint.save:write_rank_file", limited)


def test_one_rank_that_cannot_write_stops_no_other(tmp_path: Path) -> None:
    spec = tiny_spec(checkpoint={"everySteps": 2, "asynchronous": True})
    contexts = [run_context(tmp_path / name, spec) for name in ("well", "once", "for-good")]
    assert run_gang(contexts[0]) == [0, 0]
    assert run_gang(contexts[1], [SmallFiles(rank=1, first=2, last=2)]) == [0, 0]
    assert trained_files(contexts[1]) == trained_files(contexts[0])
    disk_full = EXIT_CODES[FailureClass.DISK_FULL]
    assert run_gang(contexts[2], [SmallFiles(rank=1, first=2, last=9)]) == [disk_full, disk_full]
    checkpoints = contexts[2].workspace.checkpoints
    assert sorted(path.name for path in checkpoints.iterdir()) == [LATEST, checkpoint_name(2)]
    assert run_gang(contexts[2]) == [0, 0]
    assert trained_files(contexts[2]) == trained_files(contexts[0])
