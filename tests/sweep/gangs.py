"""Gangs of two ranks that live through many cases: forked once, with the libraries imported, and replaced when a case breaks
them.

A rank answers each case on its own connection. Ranks that all fail in the same way have made the same calls, so they take the
next
case: a new process pays for a second of caches. If one rank fails alone, it is ended, so that the others see its connection
close. A gang that gives no answer in time is killed, and the case recorded so.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

RANKS = 2
DEADLINE_SECONDS = 90.0
"""For one case; far more than it takes, because the machine may be busy."""
SAME_FAILURE_SECONDS = 5.0
"""How long the other ranks may take to fail in the same way; one of them asks the gates, too."""
CASES_PER_GANG = 25
"""After which a gang is replaced, so that no case is judged in a process that is very old."""
PRELOADED = (
    "tests.support.preloaded",
    "tests.sweep.rank",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gemma.modeling_gemma",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.phi.modeling_phi",
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mamba.modeling_mamba",
    "transformers.integrations.bitsandbytes",
    "bitsandbytes",
    "peft.tuners.lora",
)


_STARTING = threading.Lock()
"""The fork server takes one order at a time."""


@dataclass(frozen=True)
class Answer:
    """What one rank says."""

    result: Any
    failure: str = ""
    """What ended work that the ranks share; empty after success, and after a failure in what this rank does alone."""


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
        answers = self._answers()
        self._done += 1
        are_in_step = len(answers) == RANKS and len({answer.failure for answer in answers.values()}) == 1
        # A rank that failed first was killed, even if the others came to the same failure later.
        are_in_step = are_in_step and all(process.exitcode is None for process, _ in self._ranks)
        if self._done >= CASES_PER_GANG or not are_in_step:
            self.close()
        return [answers[rank].result if rank in answers else None for rank in range(RANKS)]

    def _answers(self) -> dict[int, Answer]:
        """By rank, without those that died or were late. Ends a rank that failed alone, so that the others do not wait for it."""
        answers: dict[int, Answer] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            failed = [self._ranks[rank][0] for rank, answer in answers.items() if answer.failure]
            answered = wait(list(waiting), timeout=min(left, SAME_FAILURE_SECONDS) if failed else left)
            for connection in answered:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                with suppress(EOFError):
                    answers[rank] = connection.recv()
            if not answered:
                for process in failed:
                    process.kill()
        return answers

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
            connection.send(answer_of(gang, rank, request))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of collective libraries must not hold up the end.
    os._exit(0)
