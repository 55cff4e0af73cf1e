"""Runs a function on several gloo ranks, which a fork server that has imported the libraries once makes in a moment."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARIES = [
    "tests.support.preloaded",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "peft",
    "accelerate",
    "accelerate.utils.fsdp_utils",
    "bitsandbytes",
    "transformers.integrations.bitsandbytes",
    "tests.pitfalls.lab.work",
]
DEADLINE_SECONDS = 90
MOST_CASES = 25
"""After which ranks are replaced, so that no case runs in a process that is very old."""


@dataclass(frozen=True)
class RankResult:
    """What one rank returned, or the exception that ended it."""

    value: Any = None
    error: str = ""
    """Type and message."""
    trace: str = ""
    stage: str = ""
    """What the rank was at, where it said so with `enter`."""

    @property
    def failed(self) -> bool:
        return self.error != ""


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(LIBRARIES)
_at: list[str] = [""]


def enter(stage: str) -> None:
    """In a rank: say what comes next, for the report of a failure."""
    _at[0] = stage


def run_ranks(
    body: Callable[..., Any], *arguments: Any, world_size: int = 2, deadline_seconds: float = DEADLINE_SECONDS
) -> list[RankResult]:
    """`body(rank, *arguments)` on new ranks. Once one has failed the others are ended: they would wait for it for ever.

    Raises TimeoutError where ranks hang.
    """
    gang = _Gang(world_size)
    try:
        return gang.ask(body, arguments, deadline_seconds)
    finally:
        gang.end()


def run_on_kept_ranks(body: Callable[..., Any], *arguments: Any, world_size: int) -> list[RankResult]:
    """The same on ranks that have done so before, for what leaves nothing behind in its process: half the work of a new rank is
    what the libraries do the first time.

    A gang is replaced after a failure, and when it is old.
    """
    gang = _kept.pop(world_size, None) or _Gang(world_size)
    try:
        results = gang.ask(body, arguments, DEADLINE_SECONDS)
    except BaseException:
        gang.end()
        raise
    if gang.num_asked < MOST_CASES and not any(result.failed for result in results):
        _kept[world_size] = gang
    else:
        gang.end()
    return results


class _Gang:
    """Ranks that have joined each other and wait to be asked."""

    def __init__(self, world_size: int) -> None:
        self.num_asked = 0
        self._directory = tempfile.TemporaryDirectory()
        self._ends, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = _SERVER.Pipe()
            store = f"{self._directory.name}/store"
            process = _SERVER.Process(target=_serve, args=(theirs, rank, world_size, store), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def ask(self, body: Callable[..., Any], arguments: tuple[Any, ...], deadline_seconds: float) -> list[RankResult]:
        """Of every rank in order, or of those until the first that failed."""
        self.num_asked += 1
        for end in self._ends:
            end.send((body, arguments))
        results: dict[int, RankResult] = {}
        stop_at = time.monotonic() + deadline_seconds
        while len(results) < len(self._ends) and not any(result.failed for result in results.values()):
            waiting = [end for rank, end in enumerate(self._ends) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, timeout=max(stop_at - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"ranks {[rank for rank in range(len(self._ends)) if rank not in results]} gave no result")
            for end in ready:
                rank = self._ends.index(end)
                try:
                    results[rank] = end.recv()
                except EOFError:
                    results[rank] = RankResult(error=f"rank {rank} died")
        return [result for _, result in sorted(results.items())]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._directory.cleanup()


_kept: dict[int, _Gang] = {}
"""By their number of ranks."""


def _serve(end: Any, rank: int, world_size: int, store: str) -> None:
    import torch
    from torch import distributed

    # Without a collection first, which would copy every page of the server's.
    gc.freeze()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            body, arguments = end.recv()
        except EOFError:
            break
        enter("")
        try:
            result = RankResult(value=body(rank, *arguments))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            result = RankResult(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc(), stage=_at[0])
        end.send(result)
    # Without a farewell to the other ranks: they may be gone already.
    os._exit(0)
