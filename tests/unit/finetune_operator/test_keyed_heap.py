from hypothesis import given
from hypothesis import strategies as st

from finetune_operator.keyed_heap import KeyedHeap


def test_smallest_number_comes_first_and_equal_ones_in_order() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 1.0)):
        heap.put(key, at)
    assert heap.first() == (1.0, "a")
    assert [heap.pop(), heap.pop(), heap.pop(), heap.pop()] == ["a", "b", "c", None]
    assert heap.first() is None


def test_latest_number_of_a_key_counts_and_a_discarded_key_never_comes() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    heap.put("a", 1.0)
    heap.put("b", 2.0)
    heap.put("a", 3.0)
    heap.discard("b")
    heap.discard("unknown")
    assert (len(heap), "a" in heap, "b" in heap, heap.at("a"), heap.at("b")) == (1, True, False, 3.0, None)
    assert [heap.pop(), heap.pop()] == ["a", None]


def test_number_that_was_replaced_by_a_later_one_brings_its_key_out_no_sooner() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    heap.put("a", 1.0)
    heap.put("b", 2.0)
    heap.put("a", 3.0)
    assert heap.first() == (2.0, "b")
    assert [heap.pop(), heap.pop(), heap.pop()] == ["b", "a", None]


@given(st.lists(st.tuples(st.sampled_from(["put", "discard", "pop"]), st.integers(0, 5), st.floats(0, 10)), max_size=200))
def test_behaves_like_a_dictionary_that_is_searched(steps: list[tuple[str, int, float]]) -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    model: dict[int, tuple[float, int]] = {}
    for number, (action, key, at) in enumerate(steps):
        if action == "put":
            heap.put(key, at)
            model[key] = (at, number)
        elif action == "discard":
            heap.discard(key)
            model.pop(key, None)
        else:
            expected = min(model, key=lambda one: model[one], default=None)
            assert heap.pop() == expected
            if expected is not None:
                del model[expected]
        assert len(heap) == len(model)


def test_outdated_entries_of_a_heap_do_not_pile_up() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    for moment in range(10_000):
        heap.put("one", float(-moment))
    assert heap.num_entries < 100
    assert heap.first() == (-9999.0, "one")
