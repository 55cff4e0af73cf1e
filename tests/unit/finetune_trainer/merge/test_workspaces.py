"""Several threads share the buffers of a merge."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from finetune_trainer.merge.workspaces import OtherShardFailedError, Workspace, Workspaces

A_MOMENT, SECONDS = 0.05, 30


def waiting(pool: ThreadPoolExecutor, function: Callable[[], Workspace | None]) -> Future[Workspace | None]:
    """Run a function in another thread, and check that it waits."""
    future = pool.submit(function)
    with pytest.raises(TimeoutError):
        future.result(A_MOMENT)
    return future


def test_a_buffer_is_waited_for_only_by_those_that_ask_to_wait() -> None:
    workspaces = Workspaces(1)
    taken = workspaces.take(wait=False)
    assert taken is not None
    assert workspaces.take(wait=False) is None
    with ThreadPoolExecutor(1) as pool:
        later = waiting(pool, lambda: workspaces.take(wait=True))
        workspaces.give(taken)
        assert later.result(SECONDS) is taken


def test_exclusive_use_waits_for_all_buffers_and_other_threads_get_none_meanwhile() -> None:
    workspaces = Workspaces(2)
    first = workspaces.take(wait=False)
    assert first is not None

    def alone() -> Workspace:
        with workspaces.alone() as workspace:
            assert workspaces.take(wait=False) is None
            workspaces.give(workspace)
            assert workspaces.take(wait=False) is None
            return workspace

    with ThreadPoolExecutor(2) as pool:
        large = waiting(pool, alone)
        small = waiting(pool, lambda: workspaces.take(wait=True))
        workspaces.give(first)
        wait([large, small], SECONDS)
        assert large.result() is not None
        assert small.result() is not None


def test_all_waiting_threads_end_if_another_shard_has_failed() -> None:
    workspaces = Workspaces(1)
    assert workspaces.take(wait=False) is not None

    def alone() -> Workspace:
        with workspaces.alone() as workspace:
            return workspace

    with ThreadPoolExecutor(2) as pool:
        futures = [waiting(pool, alone), waiting(pool, lambda: workspaces.take(wait=True))]
        workspaces.stop()
        for future in futures:
            with pytest.raises(OtherShardFailedError):
                future.result(SECONDS)
    with pytest.raises(OtherShardFailedError):
        workspaces.take(wait=False)


def test_a_buffer_grows_and_never_shrinks() -> None:
    workspace = Workspace()
    size = len(workspace.data)
    workspace.grow(size + 1)
    workspace.grow(1)
    assert len(workspace.data) == size + 1
