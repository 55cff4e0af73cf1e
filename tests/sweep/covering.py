"""Which combinations are run: a covering array of pairs, products of what is known to interact, and a random stream.

Deterministic: the same dimensions and the same seed give the same cases on every machine.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from tests.sweep.case import UNSET, Case
from tests.sweep.dimensions import DIMENSIONS, USUAL, Dimension

Setting = tuple[str, str]
"""A dimension and one of its values."""
Pair = tuple[Setting, Setting]
Pick = Callable[[Dimension, Mapping[str, str]], str]
"""Chooses a value of a dimension beside those that are chosen already."""
_UNSET_SHARE = 0.55
"""How often a dimension that nothing asks for is left as usual: few users set everything, and combinations of everything are
refused for so many reasons at once that none of them is tested."""
_BAD_SHARE = 0.2
"""Of random cases, those with a value that a user writes by mistake."""


def pairs_to_cover(dimensions: Sequence[Dimension] = DIMENSIONS) -> set[Pair]:
    """Every pair of values of two dimensions that can stand in one manifest, but for pairs of two bad ones."""
    found = set()
    for (one, first), (other, second) in itertools.combinations([(d, v) for d in dimensions for v in d.values], 2):
        if one is other or (first in one.bad and second in other.bad):
            continue
        if _room({one.name: (first,), other.name: (second,)}, (one, other), dimensions) is not None:
            found.add(((one.name, first), (other.name, second)))
    return found


def pairs_of(values: Mapping[str, str], dimensions: Sequence[Dimension] = DIMENSIONS) -> Iterator[Pair]:
    """The pairs that a case covers, each in the order of the dimensions."""
    settings = [(d.name, values[d.name]) for d in dimensions if d.name in values]
    return itertools.combinations(settings, 2)


def covering_array(seed: int, dimensions: Sequence[Dimension] = DIMENSIONS) -> list[Case]:
    """Cases that together hold every pair: greedy, each case started from a pair that is not covered yet.

    Not the smallest array: dimensions that the pair does not ask for mostly stay unset, so that most cases are accepted.
    """
    draw = random.Random(seed)
    left = pairs_to_cover(dimensions)
    # Sets of strings have another order in every process.
    order = sorted(left)
    draw.shuffle(order)
    cases = []
    for pair in order:
        if pair not in left:
            continue
        best = max((_case_of(pair, draw, left, dimensions) for _ in range(3)), key=lambda values: _gain(values, left, dimensions))
        left.difference_update(pairs_of(best, dimensions))
        cases.append(Case(best))
    return cases


def products(tables: Iterable[Mapping[str, Sequence[str]]], dimensions: Sequence[Dimension] = DIMENSIONS) -> list[Case]:
    """Every combination of each table's values, all else as usual; those in which a dimension does not apply are left out."""
    cases = []
    for table in tables:
        for chosen in itertools.product(*table.values()):
            given = dict(zip(table, chosen, strict=True))
            values = _filled(given, dimensions, lambda dimension, _values: USUAL.get(dimension.name, dimension.good[0]))
            if all(values.get(name) == value for name, value in given.items()):
                cases.append(Case(values))
    return cases


def random_cases(seed: int, dimensions: Sequence[Dimension] = DIMENSIONS) -> Iterator[Case]:
    """An endless stream."""
    draw = random.Random(f"random {seed}")
    while True:
        is_bad = draw.random() < _BAD_SHARE
        mistaken = draw.choice([d.name for d in dimensions if d.bad]) if is_bad else None
        unset = draw.choice((0.4, 0.6, 0.8))

        yield Case(_filled({}, dimensions, partial(_drawn, draw, mistaken, unset)))


def _drawn(draw: random.Random, mistaken: str | None, unset: float, dimension: Dimension, _values: Mapping[str, str]) -> str:
    if dimension.name == mistaken:
        return draw.choice(dimension.bad)
    if dimension.name == "method":
        # LoRA's family has most of the settings.
        return draw.choice(("LoRA", "LoRA", "LoRA", "QLoRA", "DoRA", "QDoRA", "Full", draw.choice(dimension.good)))
    if dimension.good[0] == UNSET and draw.random() < unset:
        return UNSET
    return draw.choice(dimension.good)


def distinct(cases: Iterable[Case]) -> Iterator[Case]:
    """Each manifest once."""
    seen = set()
    for case in cases:
        if case.id not in seen:
            seen.add(case.id)
            yield case


def _gain(values: Mapping[str, str], left: set[Pair], dimensions: Sequence[Dimension]) -> int:
    return sum(pair in left for pair in pairs_of(values, dimensions))


def _case_of(pair: Pair, draw: random.Random, left: set[Pair], dimensions: Sequence[Dimension]) -> dict[str, str]:
    by_name = {dimension.name: dimension for dimension in dimensions}
    given = dict(pair)
    room = _room({name: (value,) for name, value in given.items()}, [by_name[name] for name in given], dimensions)
    if room is None:
        raise ValueError(f"{pair} cannot stand in one manifest")
    has_bad = any(value in by_name[name].bad for name, value in given.items())

    def pick(dimension: Dimension, values: Mapping[str, str]) -> str:
        if dimension.name in room:
            usual = USUAL.get(dimension.name)
            accepted = room[dimension.name]
            return usual if usual in accepted and draw.random() < 0.5 else draw.choice(accepted)
        if dimension.good[0] == UNSET and draw.random() < _UNSET_SHARE:
            return UNSET
        candidates = list(dimension.good)
        if not has_bad and draw.random() < 0.02:
            candidates += dimension.bad
        draw.shuffle(candidates)
        if dimension.name in USUAL and draw.random() < _UNSET_SHARE / 2:
            return USUAL[dimension.name]
        return max(
            candidates,
            key=lambda value: sum(
                ((name, chosen), (dimension.name, value)) in left for name, chosen in (*values.items(),) if name != dimension.name
            ),
        )

    return _filled({}, dimensions, pick)


def _filled(given: Mapping[str, str], dimensions: Sequence[Dimension], pick: Pick) -> dict[str, str]:
    values: dict[str, str] = {}
    for dimension in dimensions:
        if dimension.applies(values):
            values[dimension.name] = given[dimension.name] if dimension.name in given else pick(dimension, values)
    return values


def _room(
    fixed: dict[str, tuple[str, ...]], members: Iterable[Dimension], dimensions: Sequence[Dimension]
) -> dict[str, tuple[str, ...]] | None:
    """Values that earlier dimensions may take so that all `members` apply; None where that cannot be."""
    by_name = {dimension.name: dimension for dimension in dimensions}
    room = dict(fixed)
    waiting = list(members)
    while waiting:
        for name, accepted in waiting.pop().needs.items():
            before = room.get(name, by_name[name].good)
            room[name] = tuple(value for value in before if value in accepted)
            if not room[name]:
                return None
            waiting.append(by_name[name])
    return room
