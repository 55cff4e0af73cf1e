"""Limits torch to one thread per operation, for code that computes in its own threads or on a few thousand values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread_for_each_operation() -> Iterator[int]:
    """Let torch use one thread for each operation until the end of the block. Yields the previous number of threads.

    An operation that is split over threads waits for the slowest thread. While other work occupies the processors, small
    operations would take twenty times as long.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call `function` for each item, in as many threads as torch used; return results in order. Raises what `function` raises."""
    with (
        one_thread_for_each_operation() as num_threads,
        ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        return list(pool.map(function, items))
