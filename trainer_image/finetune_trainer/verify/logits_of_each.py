"""Runs several models at the same time, and lets one fall back to another way if its way turns out to be impossible.

In: sources of logits, and prompts. Out: their files. Knows nothing of weights. Called by logits.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from finetune_trainer.processes.torch_threads import one_thread_for_each_operation
from finetune_trainer.verify.streaming import NotStreamableError, Prompt

STREAMED_AT_A_TIME = 2
"""Number of sources at a time, such as references and merged model: while weights of one are read, the others compute."""
COMPUTING_AT_A_TIME = 3
"""Base, base + adapters and merged model. Each of them has its share of the processors: many small operations in few threads take
less time than one after another in all threads.
"""


class LogitModels(Protocol):
    """A source of logits of one or more models."""

    dtype: torch.dtype

    @property
    def is_whole(self) -> bool:
        """Whether `logits` loads whole models, which it must do alone: because of memory, and because the library then has
        settings for all threads.
        """

    def logits(self, prompts: Sequence[Prompt], directory: Path) -> dict[str, list[Path]]:
        """A file for each prompt, by model; see streaming.py. `fall_back` may handle what it raises."""

    def fall_back(self, error: Exception) -> None:
        """Prepare another way after `logits` has raised. Nothing may compute meanwhile. Raises `error` if there is no other
        way.
        """


def logits_of_each(models: Sequence[LogitModels], prompts: Sequence[Prompt], directory: Path) -> list[dict[str, list[Path]]]:
    """The answers of each of `models`, in directories of its own below `directory`. Raises an error without a fall-back.

    Some run at the same time. Forward passes of models of one class must support that (nn.DataParallel), but building models need
    not, so nothing is built meanwhile.
    """
    answers: dict[int, dict[str, list[Path]]] = {}
    while missing := [number for number in range(len(models)) if number not in answers]:
        at_a_time = 1 if any(model.is_whole for model in models) else STREAMED_AT_A_TIME
        with _processors_shared(COMPUTING_AT_A_TIME if at_a_time > 1 else 1), ThreadPoolExecutor(at_a_time) as pool:
            running: dict[int, Future[dict[str, list[Path]]]] = {}
            for number in missing:
                (directory / str(number)).mkdir(exist_ok=True)
                running[number] = pool.submit(models[number].logits, prompts, directory / str(number))
        for number, future in running.items():
            try:
                answers[number] = future.result()
            # torch refuses some operations on a weight without values.
            except (NotStreamableError, RuntimeError) as error:
                models[number].fall_back(error)
    return [answers[number] for number in range(len(models))]


@contextmanager
def _processors_shared(num_computing: int) -> Iterator[None]:
    """Give operations of each started thread a share of the processors, rounded up, until the end of the block."""
    with one_thread_for_each_operation() as num_threads:
        torch.set_num_threads(-(-num_threads // num_computing))
        yield
