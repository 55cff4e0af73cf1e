"""The case that a user comes to who mends what a finding says: the same one with other values of the settings it names."""

import itertools
from collections.abc import Iterable, Iterator

from tests.sweep.case import FIELDS, UNSET, Case
from tests.sweep.dimensions import DIMENSIONS

_AT_MOST = 12
"""Each is run."""


def alternatives(case: Case, fields: Iterable[str]) -> Iterator[Case]:
    """Combinations of right values of these fields and those that they have; the first one leaves out all that can be.

    fields: paths under the manifest's `spec`, such as `merge.enabled`. Nothing for a field that no dimension has.
    """
    wanted = set(fields)
    named = [dimension for dimension in DIMENSIONS if dimension.name in case.values and FIELDS.get(dimension.name) in wanted]
    names = [dimension.name for dimension in named]
    # A field that is unset may be at fault by its default, and one of several may be right as it is.
    choices = [
        sorted({*dimension.good, case.values[dimension.name]}, key=lambda value: (value != UNSET, value)) for dimension in named
    ]
    seen = {case.id}
    for values in itertools.islice(itertools.product(*choices), _AT_MOST):
        found = _with(case, dict(zip(names, values, strict=True)))
        if found.id not in seen:
            seen.add(found.id)
            yield found


def _with(case: Case, change: dict[str, str]) -> Case:
    values: dict[str, str] = {}
    for dimension in DIMENSIONS:
        if dimension.applies(values):
            values[dimension.name] = change.get(dimension.name, case.values.get(dimension.name, dimension.good[0]))
    return Case(values)
