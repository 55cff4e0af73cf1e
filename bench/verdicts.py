"""What a benchmark says of a target: reached or missed, with the figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Of one target. figure: the median of what was measured."""

    what: str
    figure: float
    target: str
    is_reached: bool

    def __str__(self) -> str:
        return f"{'reached' if self.is_reached else 'MISSED'}: {self.what} is {self.figure:.3f}, the target is {self.target}"


def above(what: str, figure: float, bound: float) -> Verdict:
    return Verdict(what, figure, f"more than {bound:g}", figure > bound)


def at_least(what: str, figure: float, bound: float) -> Verdict:
    return Verdict(what, figure, f"at least {bound:g}", figure >= bound)


def at_most(what: str, figure: float, bound: float) -> Verdict:
    return Verdict(what, figure, f"at most {bound:g}", figure <= bound)


def are_reached(verdicts: Iterable[Verdict]) -> bool:
    return all(verdict.is_reached for verdict in verdicts)
