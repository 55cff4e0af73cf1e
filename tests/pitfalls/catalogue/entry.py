"""One entry of the decision table: what is written about a pitfall, what the locked libraries do, and what this product does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """When the pitfall shows."""

    START = "fails at the start"
    SAVE = "fails at save, resume or merge"
    SILENT = "silently wrong"
    SLOW = "wasteful"
    NOTICE = "notice only"


@dataclass(frozen=True)
class Reproduced:
    """The locked libraries do what was reported."""

    tests: tuple[str, ...]
    """Tests that show it: `tests/pitfalls/test_x.py::test_y`, without parameters."""


@dataclass(frozen=True)
class Changed:
    """The locked libraries do something else than was reported."""

    now: str
    tests: tuple[str, ...]
    """Tests that show what they do now."""


@dataclass(frozen=True)
class NotReproduced:
    """Nothing was run on the locked versions: it needs a GPU, another version of a library, or a path that this product lacks."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """A job with such settings is refused, or accepted with a warning where every rule named here only warns."""

    rules: tuple[str, ...] = ()
    """Ids of rules of the book."""
    preflight: tuple[str, ...] = ()
    """Ids of preflight's findings, which look at the model, the tokenizer and the data."""
    schema: str = ""
    """What the schema takes instead, where the object cannot even be written down."""
    tests: tuple[str, ...] = ()
    """Tests of the refusal; needed where no rule is named, because a rule names its own."""


@dataclass(frozen=True)
class Avoided:
    """Such settings are accepted, and come to no harm under this trainer."""

    how: str
    tests: tuple[str, ...]
    """Tests that show it on the trainer's, the merge's or preflight's own path."""


@dataclass(frozen=True)
class NotApplicable:
    """No job can come to this: the setting, the library path or the version does not exist here."""

    reason: str


@dataclass(frozen=True)
class Entry:
    """A pitfall."""

    number: int
    """From 1, as in the collection of reports that the table decides upon."""
    name: str
    """The collection's own id of the pitfall."""
    severity: Severity
    trigger: str
    """Settings that bring it about, in the libraries' terms."""
    result: str
    """What the libraries then do."""
    evidence: Reproduced | Changed | NotReproduced
    decision: Refused | Avoided | NotApplicable
    sources: tuple[str, ...] = ()
    """Issues, documentation, source files; none where it was only ever measured."""
