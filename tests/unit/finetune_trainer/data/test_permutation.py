"""The order of sequences is a bijection of every epoch, found without state, and never changes between releases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data.permutation import position

SEEDS = st.integers(0, 2**32 - 1)
EPOCHS = st.integers(0, 1000)


@given(seed=SEEDS, epoch=EPOCHS, n=st.integers(1, 300))
def test_every_epoch_visits_every_sequence_once(seed, epoch, n):
    assert sorted(position(seed, epoch, index, n) for index in range(n)) == list(range(n))


@given(seed=SEEDS, epoch=EPOCHS, n=st.integers(1, 10**12), data=st.data())
def test_places_of_a_large_data_set_are_distinct_and_in_range(seed, epoch, n, data):
    indices = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=20))
    found = {position(seed, epoch, index, n) for index in indices}
    assert len(found) == len(indices)
    assert all(0 <= sequence < n for sequence in found)


@given(seed=SEEDS, epoch=EPOCHS)
def test_orders_differ_by_epoch_and_by_seed(seed, epoch):
    def order(seed, epoch):
        return [position(seed, epoch, index, 200) for index in range(200)]

    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)
    assert order(seed, epoch) != list(range(200))


def test_first_places_are_spread_over_the_data():
    """A hash that left its upper bits alone would still be a bijection, and would not shuffle."""
    first = [position(0, epoch, 0, 1000) for epoch in range(200)]
    assert len(set(first)) > 150
    assert 400 < sum(first) / len(first) < 600


def test_order_is_part_of_the_checkpoint_format():
    """A resumed run continues an order that an older release began."""
    assert [position(0, 0, index, 10) for index in range(10)] == [6, 3, 4, 2, 8, 9, 0, 7, 1, 5]
    assert position(4_294_967_295, 7, 123_456_789, 10**9) == 965_863_213


@pytest.mark.parametrize(
    ("seed", "epoch", "index", "n"), [(0, 0, 3, 3), (0, 0, -1, 3), (0, 0, 0, 0), (-1, 0, 0, 3), (0, -1, 0, 3)]
)
def test_places_outside_the_epoch_are_refused(seed, epoch, index, n):
    with pytest.raises(ValueError, match=r"index|seed"):
        position(seed, epoch, index, n)
