import pytest

from finetune_operator.cluster.reader import LruCache


def test_result_is_made_once_and_the_longest_unasked_one_goes_first() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    results: LruCache[str, str] = LruCache(2)
    for key in ("a", "b", "a", "c", "a", "b"):
        assert results.get(key, lambda key=key: make(key)) == key.upper()
    assert made == ["a", "b", "c", "b"]
    assert len(results) == 2


def test_failure_is_not_remembered() -> None:
    results: LruCache[str, int] = LruCache(2)

    def broken() -> int:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        results.get("a", broken)
    assert results.get("a", lambda: 1) == 1
