"""How many threads torch gives to one operation. For code that computes in threads of its own, or on a few thousand values."""

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
    """Until the end of the block; gives how many threads an operation had before.

    An operation that is shared out waits for its slowest thread. If other work has the processors, small ones take twenty times
    as long so.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in the order of the items, as many at a time as an operation may have threads. Raises what `function` does."""
    with (
        one_thread_for_each_operation() as num_threads,
        ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        return list(pool.map(function, items))
