"""Operations of torch use one thread where other threads are the parallelism, and as many as before afterwards."""

import pytest
import torch

from finetune_trainer.processes.torch_threads import map_in_threads, one_thread_for_each_operation


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_an_operation_has_one_thread_until_the_end_of_the_block_whatever_ends_it() -> None:
    seen = []

    def fail() -> None:
        with one_thread_for_each_operation() as before:
            seen.extend((before, torch.get_num_threads()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (*seen, torch.get_num_threads()) == (3, 1, 3)


def test_results_come_in_order_from_threads_with_one_thread_for_each_operation() -> None:
    found = map_in_threads(lambda number: (number, torch.get_num_threads()), range(9))
    assert found == [(number, 1) for number in range(9)]
    assert torch.get_num_threads() == 3
