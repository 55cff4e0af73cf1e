"""Gangs of ranks as forked processes: seconds less per rank than torchrun, because the fork server has imported torch already.

Ranks are forked from a server that does nothing else, so neither threads nor autograd state of the test process come along.
"""

import functools
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from finetune_trainer.context import RunContext

DEADLINE_SECONDS = 500.0
"""Time limit of a gang. It is much longer than needed, because the machine may be busy."""
PRELOADED = (
    "tests.support.preloaded",
    "tests.support.forked_ranks",
    "finetune_trainer.train.rank",
    "transformers.models.llama.modeling_llama",
    "peft.tuners.lora",
)


_ASKING = threading.Lock()
"""Starting a process asks for the ends of all others of this one, and of two threads that ask for the same end at once one reads
it and the other takes it for 255."""


class Disturbance(Protocol):
    """Something that will happen to a rank; sent to the rank's process and armed there."""

    def arm(self, rank: int) -> None:
        """Prepare it in this process."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank: it sends itself `signal` before the `call`-th call (from 1) of a function of the trainer."""

    function: str
    """`module:name` where it is looked up, below finetune_trainer."""
    call: int = 1
    rank: int = 0
    signal: int = signal.SIGKILL

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name}-{self.function}-{self.call}-rank{self.rank}"

    def arm(self, rank: int) -> None:
        if rank == self.rank:
            before_call(self.function, self.call, lambda: os.kill(os.getpid(), self.signal))


def before_call(function: str, call: int, action: Callable[[], object]) -> None:
    """Do something in this process before the `call`-th call (from 1) of the trainer's `module:name`."""
    calls = itertools.count(1)

    def counted(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            action()
        return original(*arguments, **named)

    wrap(function, counted)


def wrap(function: str, wrapper: Callable[..., Any]) -> None:
    """Replace the trainer's `module:name` in this process by `wrapper(original, *arguments, **named)`."""
    module_name, _, name = function.partition(":")
    module = import_module(f"finetune_trainer.{module_name}")
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(partial(wrapper, original)))


def run_gang(context: RunContext, faults: Sequence[Disturbance] = (), world_size: int | None = None) -> list[int]:
    """Exit code of each rank (negative: the signal). When a signal ended one the others are killed, as an agent would do."""
    world_size = world_size or context.plan.parallelism.world_size
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        return run_processes([partial(_train, context, rank, world_size, store, tuple(faults)) for rank in range(world_size)])


def run_processes(bodies: Sequence[Callable[[], Any]]) -> list[int]:
    """Run each body in a forked process; the exit codes. A body's return value, if a number, is its exit code."""
    import torch

    # What the server imports asks for the devices, and no fork of it could use one then. Counting them asks the driver alone.
    server = multiprocessing.get_context("spawn" if torch.cuda.device_count() else "forkserver")
    server.set_forkserver_preload(list(PRELOADED))
    processes: list[BaseProcess] = [server.Process(target=_exit_with, args=(body,)) for body in bodies]
    with _ASKING:
        for process in processes:
            process.start()
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while running := _running(processes):
            left = deadline - time.monotonic()
            if left <= 0 or any((process.exitcode or 0) < 0 for process in processes if process not in running):
                break
            wait([process.sentinel for process in running], timeout=left)
        assert time.monotonic() < deadline, f"ranks did not end within {DEADLINE_SECONDS} s"
    finally:
        for process in _running(processes):
            process.kill()
            wait([process.sentinel])
        _running(processes)
    return [process.exitcode if process.exitcode is not None else 0 for process in processes]


def _running(processes: Sequence[BaseProcess]) -> list[BaseProcess]:
    with _ASKING:
        return [process for process in processes if process.exitcode is None]


def _exit_with(body: Callable[[], Any]) -> None:
    import torch

    torch.set_num_threads(1)
    # Without a collection first, which would copy every page of the server's.
    gc.freeze()
    try:
        result = body()
        code = result if isinstance(result, int) else 0
    except BaseException:  # noqa: BLE001 - whatever it was, the exit code says that it failed
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # As in the rank's own main: threads of collective libraries must not hold up the end.
    os._exit(code)


def _train(context: RunContext, rank: int, world_size: int, store: str, faults: tuple[Disturbance, ...]) -> int:
    from finetune_trainer.termination import exit_code
    from finetune_trainer.train.rank import run_rank

    for fault in faults:
        fault.arm(rank)
    return exit_code(
        run_rank(context, rank=rank, world_size=world_size, local_rank=rank, node_rank=0, observe_port=0, init_method=store)
    )


def trained_files(context: RunContext) -> dict[str, bytes]:
    """Content of everything that the run exported."""
    directory: Path = context.workspace.adapter
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
