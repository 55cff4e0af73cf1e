"""Every class of failure, injected into real ranks: what the first failing rank reports, and that all of them end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune_job.failures import EXIT_CODES, TERMINATION_LIMIT_BYTES, FailureClass, TerminationReport
from finetune_trainer.context import RunContext
from finetune_trainer.ranks.reports import SilentEvidence, rank_report_name, read_rank_reports, root_cause, silent_failures
from finetune_trainer.roles.train import kills_for_memory
from tests.support.forked_ranks import run_gang, run_processes
from tests.support.tiny_model import run_context, tiny_spec, write_tiny_prepared

Fault = Callable[[], None]


def run_with(context: RunContext, fault: Fault, function: str = "train.step:seed_forward_pass", call: int = 5) -> list[int]:
    """Run the gang; `fault` happens to rank 1 before the `call`-th call of a function. Each step has two such calls per rank."""
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        return run_processes([partial(_rank, context, store, rank, fault if rank else None, function, call) for rank in (0, 1)])


def _rank(context: RunContext, store: str, rank: int, fault: Fault | None, function: str, call: int) -> int:
    from finetune_trainer.termination import exit_code
    from finetune_trainer.train import rank as rank_module

    rank_module.ECHO_SECONDS = 0.5
    if fault is not None:
        module_name, _, name = function.partition(":")
        module = import_module(f"finetune_trainer.{module_name}")
        original, calls = getattr(module, name), [0]

        def faulty(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                fault()
            return original(*arguments, **named)

        setattr(module, name, faulty)
    return exit_code(
        rank_module.run_rank(context, rank=rank, world_size=2, local_rank=rank, node_rank=0, observe_port=0, init_method=store)
    )


def cause_of(context: RunContext) -> TerminationReport:
    reports = read_rank_reports(context.workspace.reports("train", 0))
    cause = root_cause(reports)
    assert cause is not None
    assert all(len(report.envelope().encode()) <= TERMINATION_LIMIT_BYTES for report in reports)
    return cause


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), FailureClass.DEVICE_OUT_OF_MEMORY),
        (ValueError("something nobody foresaw " + "x" * 9000), FailureClass.INTERNAL),
    ],
    ids=lambda value: value.name if isinstance(value, FailureClass) else "",
)
def test_the_rank_that_failed_is_the_cause_and_the_other_its_echo(
    tmp_path: Path, error: Exception, failure: FailureClass
) -> None:
    context = run_context(tmp_path, tiny_spec(checkpoint={"everySteps": 1}))
    assert run_with(context, partial(raise_, error)) == [EXIT_CODES[FailureClass.COLLECTIVE], EXIT_CODES[failure]]
    cause = cause_of(context)
    assert (cause.failure, cause.rank, cause.message) == (failure, 1, str(error))
    assert "seed_forward_pass" in cause.exception
    assert cause.step == 2
    if failure is not FailureClass.INTERNAL:
        assert cause.hint
    # What was saved before is unharmed: the next attempt continues from there.
    assert run_gang(context) == [0, 0]


def test_a_damaged_shard_is_a_failure_of_the_data(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    for path in context.workspace.prepared.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.write_bytes(path.read_bytes()[:-3])
    assert run_gang(context) == [EXIT_CODES[FailureClass.USER_DATA]] * 2
    cause = cause_of(context)
    assert cause.failure is FailureClass.USER_DATA
    assert str(context.workspace.prepared) in cause.message


def test_an_infinite_weight_is_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    shutil.rmtree(context.workspace.prepared)
    write_tiny_prepared(context.workspace.prepared, num_validation=0)
    path = context.base_model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    assert run_gang(context) == [EXIT_CODES[FailureClass.NON_FINITE]] * 2
    cause = cause_of(context)
    assert (cause.failure, cause.step) == (FailureClass.NON_FINITE, 1)
    assert cause.hint


def test_a_collective_that_times_out_has_its_own_class(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        codes = run_processes([partial(_late, context, store, rank) for rank in (0, 1)])
    assert codes[0] == EXIT_CODES[FailureClass.COLLECTIVE]
    cause = cause_of(context)
    assert (cause.failure, cause.rank) == (FailureClass.COLLECTIVE, 0)


def _late(context: RunContext, store: str, rank: int) -> int:
    from finetune_trainer.ranks import gang

    gang.collective_timeout = lambda _seconds: timedelta(seconds=5)  # type: ignore[assignment]
    reported = context.workspace.reports("train", 0) / rank_report_name(0)
    return _rank(context, store, rank, partial(_wait_for, reported) if rank else None, "train.step:seed_forward_pass", 5)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def small_file_system(directory: Path, kilobytes: int) -> Iterator[None]:
    directory.mkdir(parents=True)
    options = ("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(directory))
    if os.getuid() != 0 or subprocess.run(["mount", *options], check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_full_workspace_is_named_and_harms_no_older_checkpoint(tmp_path: Path) -> None:
    spec = tiny_spec(method={"type": "Full", "lora": None}, training={"learningRate": "1e-3"}, checkpoint={"everySteps": 1})
    with small_file_system(tmp_path / "workspace", 2048):
        context = run_context(tmp_path, spec)
        # Room for the first checkpoints only: the rest of the file system is taken.
        filler = tmp_path / "workspace" / "filler"
        state = os.statvfs(tmp_path / "workspace")
        filler.write_bytes(bytes(max(state.f_bavail * state.f_frsize - (800 << 10), 0)))
        codes = run_gang(context)
        assert EXIT_CODES[FailureClass.DISK_FULL] in codes
        assert set(codes) <= {EXIT_CODES[FailureClass.DISK_FULL], EXIT_CODES[FailureClass.COLLECTIVE]}
        filler.unlink()
        kept = sorted(path.name for path in context.workspace.checkpoints.glob("step-*") if ".tmp-" not in path.name)
        assert kept
        # With room again the run continues from the newest whole checkpoint.
        assert run_gang(context) == [0, 0]


def test_a_process_that_the_kernel_kills_for_memory_is_found_in_its_cgroup(tmp_path: Path) -> None:
    hierarchy = Path("/sys/fs/cgroup/memory")
    version_1 = hierarchy.is_dir()
    group = (hierarchy if version_1 else Path("/sys/fs/cgroup")) / f"finetune-unit-{os.getpid()}"
    limit, events = ("memory.limit_in_bytes", "memory.oom_control") if version_1 else ("memory.max", "memory.events")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("the memory controller is not delegated to children of the root cgroup")
        (group / limit).write_text(str(64 << 20))
        if not version_1:
            (group / "memory.swap.max").write_text("0")
        assert kills_for_memory([group / events]) == 0
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        hungry = f"import os; {join}; print(len(bytearray(b'x') * (256 << 20)))"
        done = subprocess.run([sys.executable, "-c", hungry], check=False, capture_output=True)
        assert done.returncode == -signal.SIGKILL
        assert kills_for_memory([group / events]) > 0
        (silent,) = silent_failures({1: done.returncode}, [], SilentEvidence("train", 0, 0, True, {}, now=1.0))
        assert (silent.failure, silent.rank) == (FailureClass.HOST_OUT_OF_MEMORY, 1)
    finally:
        group.rmdir()


def test_losing_all_progress_is_never_silent(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    assert run_gang(context) == [0, 0]
    for path in context.workspace.checkpoints.glob("step-*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    assert run_gang(context) == [EXIT_CODES[FailureClass.CHECKPOINT_INVALID]] * 2
    cause = cause_of(context)
    assert cause.failure is FailureClass.CHECKPOINT_INVALID
    assert all(path.name in cause.message for path in context.workspace.checkpoints.glob("step-*"))
    assert "remove the directory" in cause.hint
    for path in context.workspace.checkpoints.glob("step-*"):
        shutil.rmtree(path)
    assert run_gang(context) == [EXIT_CODES[FailureClass.CHECKPOINT_INVALID]] * 2
    # As the hint says.
    shutil.rmtree(context.workspace.checkpoints)
    for path in (context.workspace.history, context.workspace.accounts):
        path.unlink()
    assert run_gang(context) == [0, 0]
