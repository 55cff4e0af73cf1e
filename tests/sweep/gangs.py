"""Gangs of two ranks that live through many cases: forked once, with the libraries imported, and replaced when a case breaks them.

A rank answers each case on its own connection. Where one rank fails the other sees its connection close, so a rank that failed
ends; a gang that gives no answer in time is killed, and the case recorded so.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

RANKS = 2
DEADLINE_SECONDS = 90.0
"""For one case; far more than it takes, because the machine may be busy."""
CASES_PER_GANG = 25
"""After which a gang is replaced, so that no case is judged in a process that is very old."""
PRELOADED = (
    "tests.sweep.rank",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gemma.modeling_gemma",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mamba.modeling_mamba",
    "transformers.integrations.bitsandbytes",
    "bitsandbytes",
    "peft.tuners.lora",
    "peft.tuners.lora.bnb",
)


_STARTING = threading.Lock()
"""The fork server takes one order at a time."""


@dataclass(frozen=True)
class Answer:
    """What one rank says."""

    result: Any
    is_usable: bool
    """Whether this process can go on to another case."""


Body = Callable[[Any, int, Any], Answer]
"""(gang, rank, request) -> answer."""


class GangPool:
    """A gang that is there whenever one is asked for."""

    def __init__(self, body: str) -> None:
        """body: `module:name` of a `Body`, imported in the ranks."""
        self._body = body
        self._server = multiprocessing.get_context("forkserver")
        self._server.set_forkserver_preload([*PRELOADED, body.partition(":")[0]])
        self._ranks: list[tuple[Any, Connection]] = []
        self._done = 0

    def ask(self, request: Any) -> list[Any | None]:
        """Each rank's result; None for a rank that died or gave no answer in time."""
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send(request)
        answers: list[Answer | None] = [None] * RANKS
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    answers[rank] = ready.recv()
                except EOFError:
                    continue
        self._done += 1
        if self._done >= CASES_PER_GANG or any(answer is None or not answer.is_usable for answer in answers):
            self.close()
        return [None if answer is None else answer.result for answer in answers]

    def close(self) -> None:
        """End the gang."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        if self._ranks:
            self._directory.cleanup()
        self._ranks = []

    def _start(self) -> None:
        self._done = 0
        self._directory = tempfile.TemporaryDirectory(prefix="gang-")
        store = f"file://{self._directory.name}/store"
        for rank in range(RANKS):
            ours, theirs = self._server.Pipe()
            log = f"{self._directory.name}/{rank}.log"
            process = self._server.Process(target=_serve, args=(self._body, rank, store, theirs, log), daemon=True)
            with _STARTING:
                process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _serve(body: str, rank: int, store: str, connection: Connection, log: str) -> None:
    from importlib import import_module

    # What libraries print is of no use among the results.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

    import torch

    from finetune_trainer.ranks.gang import joined

    torch.set_num_threads(1)
    # What the server has loaded is never looked through, and its pages are not copied for that.
    gc.freeze()
    module, _, name = body.partition(":")
    answer_of: Body = getattr(import_module(module), name)
    with joined(rank, RANKS, rank, store, 60) as gang:
        while True:
            try:
                request = connection.recv()
            except EOFError:
                break
            answer = answer_of(gang, rank, request)
            connection.send(answer)
            if not answer.is_usable:
                break
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of collective libraries must not hold up the end.
    os._exit(0)
