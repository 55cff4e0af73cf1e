"""The fixed list of cases, and slices of the random stream."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from tests.support.cases import table
from tests.sweep.case import Case
from tests.sweep.covering import covering_array, distinct, products, random_cases
from tests.sweep.dimensions import BY_NAME

FIXED_SEED = 6
Settings = tuple[str, tuple[str, ...]]
"""A dimension and some of its values."""
PRODUCTS: list[dict[str, Sequence[str]]] = table(__file__, "PRODUCTS")


def fixed_cases() -> Iterator[Case]:
    """The same list every time: pairs first, then products, both in a shuffled order, so that any part of it is varied."""
    pairs, rest = covering_array(FIXED_SEED), products(PRODUCTS)
    draw = random.Random(FIXED_SEED)
    draw.shuffle(pairs)
    draw.shuffle(rest)
    mixed = [case for both in itertools.zip_longest(pairs, rest) for case in both if case is not None]
    return distinct(mixed)


def settings_of(text: str) -> Settings:
    """Of `name=value,value`. Raises ValueError where there is no such dimension or value."""
    name, _, values = text.partition("=")
    dimension = BY_NAME.get(name)
    if dimension is None:
        raise ValueError(f"{name!r} is not one of {', '.join(BY_NAME)}")
    chosen = tuple(values.split(","))
    if unknown := [value for value in chosen if value not in dimension.values]:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(dimension.values)}")
    return name, chosen


def with_settings(cases: Iterable[Case], wanted: Sequence[Settings]) -> Iterator[Case]:
    """Those that have one of the values of each dimension."""
    return (case for case in cases if all(case.of(name) in values for name, values in wanted))


def random_stream(seed: int, without: set[str]) -> Iterator[Case]:
    """New ones of the stream of a seed."""
    return (case for case in distinct(random_cases(seed)) if case.id not in without)
