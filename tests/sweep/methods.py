"""The rows of docs/reference/methods.md, and which cases of the sweep answer them."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from finetune_job.methods import Family, supported
from tests.support.cases import table
from tests.sweep.case import Case
from tests.sweep.covering import products

VERSIONS = ("2", "1")


@dataclass(frozen=True)
class Row:
    """Something that people ask about."""

    title: str
    values: Mapping[str, str]


@dataclass(frozen=True)
class Attempt:
    """A way to have it, tried in this order until one works."""

    condition: str
    """What has to be set for it; empty: nothing."""
    values: Mapping[str, str] = field(default_factory=dict)


_WHOLE = {"precision": "fp32", "use_orig": "true"}
ATTEMPTS = (
    Attempt(""),
    Attempt("`merge.enabled: false`", {"merge": "false"}),
    Attempt("`training.precision: fp32`", {"precision": "fp32"}),
    Attempt("`training.precision: fp32` and `useOrigParams: true`", _WHOLE),
    Attempt("one rank", {"ranks": "1"}),
    Attempt("one rank and `merge.enabled: false`", {"ranks": "1", "merge": "false"}),
)
LORA_ROWS = tuple(Row(title, values) for title, values in table(__file__, "LORA_ROWS").items())
OTHER_ROWS = tuple(Row(kind.value, {"method": kind.value}) for kind in supported(Family.OTHER))
ROWS = (*LORA_ROWS, *OTHER_ROWS)


def case_of(row: Row, version: str, attempt: Attempt) -> Case | None:
    """None where the attempt does not apply to the row."""
    values = {**row.values, "version": version, **attempt.values}
    found = products([{name: (value,) for name, value in values.items()}])
    return found[0] if found else None


def table_cases(attempt: Attempt, answered: Set[tuple[str, str]]) -> dict[tuple[str, str], Case]:
    """What to run next, by row and version; `answered`: those that need no further attempt."""
    cases = {(row.title, version): case_of(row, version, attempt) for row in ROWS for version in VERSIONS}
    return {key: case for key, case in cases.items() if case is not None and key not in answered}
