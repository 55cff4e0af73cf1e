"""The index from owner to owned says what a dictionary of sets would say."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from finetune_operator.cluster.store import OwnerIndex

OWNERS, UIDS = ("a", "b"), tuple(f"uid-{number:02}" for number in range(20))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(OWNERS), st.sampled_from(UIDS)), max_size=120))
def test_it_is_a_dictionary_of_sets(changes: list[tuple[bool, str, str]]) -> None:
    """Up to twenty for one owner: more than what is kept without a set."""
    index, expected = OwnerIndex(), {owner: set[str]() for owner in OWNERS}
    for is_added, owner, uid in changes:
        (index.add if is_added else index.discard)(owner, uid)
        (expected[owner].add if is_added else expected[owner].discard)(uid)
        assert {name: index.of(name) for name in OWNERS} == {name: sorted(uids) for name, uids in expected.items()}
        assert [name in index for name in OWNERS] == [bool(uids) for uids in expected.values()]
        assert len(index) == sum(bool(uids) for uids in expected.values())


def test_many_children_of_one_owner_cost_no_square_of_their_number() -> None:
    """A tenant can make ten thousand pods that name one Job as their owner."""
    index = OwnerIndex()
    for number in range(50_000):
        index.add("owner", f"uid-{number}")
    assert isinstance(index._owned["owner"], set)
    assert len(index.of("owner")) == 50_000
