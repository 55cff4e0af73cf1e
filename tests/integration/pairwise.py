"""Few rows in which every two values of two parameters meet."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(parameters: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows with one value for each parameter, the same at every call. The first row has the first value of all.

    Greedy: each row begins with a pair that no row has yet and takes of each further parameter the value that meets most others
    for the first time.
    """
    names = list(parameters)
    left = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(range(len(names)), 2)
        for first in range(len(parameters[names[one]]))
        for second in range(len(parameters[names[other]]))
    }
    rows = []
    row = dict.fromkeys(range(len(names)), 0)
    while True:
        left -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append({names[place]: parameters[names[place]][value] for place, value in row.items()})
        if not left:
            return rows
        row = dict(min(left))
        for place in range(len(names)):
            if place not in row:
                row[place] = max(
                    range(len(parameters[names[place]])),
                    key=lambda value, place=place, row=row: sum(
                        tuple(sorted(((place, value), other))) in left for other in row.items()
                    ),
                )
