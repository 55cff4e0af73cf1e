"""Runs a function on several gloo ranks, which a fork server that has imported the libraries once makes in a moment."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARIES = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "peft",
    "accelerate",
    "accelerate.utils.fsdp_utils",
    "bitsandbytes",
    "tests.pitfalls.lab.work",
    "tests.support.compiled_conversions",
]
DEADLINE_SECONDS = 90


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
    """`body(rank, *arguments)` on each rank. Once one rank has failed the others are ended: they would wait for it for ever.

    Raises TimeoutError where ranks hang.
    """
    with tempfile.TemporaryDirectory() as directory:
        return _run(body, arguments, Path(directory) / "store", world_size, deadline_seconds)


def _run(
    body: Callable[..., Any], arguments: tuple[Any, ...], store: Path, world_size: int, deadline_seconds: float
) -> list[RankResult]:
    ends, processes = [], []
    for rank in range(world_size):
        ours, theirs = _SERVER.Pipe(duplex=False)
        process = _SERVER.Process(target=_rank, args=(theirs, body, rank, world_size, str(store), arguments), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    results: dict[int, RankResult] = {}
    stop_at = time.monotonic() + deadline_seconds
    try:
        while len(results) < world_size and not any(result.failed for result in results.values()):
            waiting = [end for rank, end in enumerate(ends) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, timeout=max(stop_at - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"ranks {[rank for rank in range(world_size) if rank not in results]} gave no result")
            for end in ready:
                rank = ends.index(end)
                try:
                    results[rank] = end.recv()
                except EOFError:
                    results[rank] = RankResult(error=f"rank {rank} died")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [result for _, result in sorted(results.items())]


def _rank(end: Any, body: Callable[..., Any], rank: int, world_size: int, store: str, arguments: tuple[Any, ...]) -> None:
    import torch
    from torch import distributed

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        end.send(RankResult(value=body(rank, *arguments)))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        end.send(RankResult(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc(), stage=_at[0]))
    end.close()
    # Without a farewell to the other ranks: they may be gone already, and the result is delivered.
    os._exit(0)
