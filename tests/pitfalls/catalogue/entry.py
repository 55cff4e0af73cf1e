"""One entry of the decision table: what is written about a pitfall, what the locked libraries do, and what this product does."""

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

FOLDER = Path(__file__).parent / "data"
COUNT = 173
_entry = dataclass(frozen=True, config=ConfigDict(extra="forbid"))


class Severity(StrEnum):
    """When the pitfall shows."""

    START = "fails at the start"
    SAVE = "fails at save, resume or merge"
    SILENT = "silently wrong"
    SLOW = "wasteful"
    NOTICE = "notice only"


@_entry
class Reproduced:
    """The locked libraries do what was reported."""

    kind: Literal["reproduced"]
    tests: tuple[str, ...]
    """Tests that show it: `tests/pitfalls/test_x.py::test_y`, without parameters."""


@_entry
class Changed:
    """The locked libraries do something else than was reported."""

    kind: Literal["changed"]
    now: str
    tests: tuple[str, ...]
    """Tests that show what they do now."""


@_entry
class NotReproduced:
    """Nothing was run on the locked versions: it needs a GPU, another version of a library, or a path that this product lacks."""

    kind: Literal["not-run"]
    reason: str


@_entry
class Refused:
    """A job with such settings is refused, or accepted with a warning where every rule named here only warns."""

    kind: Literal["refused"]
    rules: tuple[str, ...] = ()
    """Ids of rules of the book."""
    preflight: tuple[str, ...] = ()
    """Ids of preflight's findings, which look at the model, the tokenizer and the data."""
    schema: str = ""
    """What the schema takes instead, where the object cannot even be written down."""
    tests: tuple[str, ...] = ()
    """Tests of the refusal; needed where no rule is named, because a rule names its own."""


@_entry
class Avoided:
    """Such settings are accepted, and come to no harm under this trainer."""

    kind: Literal["avoided"]
    how: str
    tests: tuple[str, ...]
    """Tests that show it on the trainer's, the merge's or preflight's own path."""


@_entry
class NotApplicable:
    """No job can come to this: the setting, the library path or the version does not exist here."""

    kind: Literal["not-applicable"]
    reason: str


@_entry
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
    evidence: Annotated[Reproduced | Changed | NotReproduced, Field(discriminator="kind")]
    decision: Annotated[Refused | Avoided | NotApplicable, Field(discriminator="kind")]
    sources: tuple[str, ...] = ()
    """Issues, documentation, source files; none where it was only ever measured."""


def entries() -> list[Entry]:
    """Read all entries of data/*.toml, in the order of their numbers. Raises ValueError for keys that an entry does not have."""
    written = [
        pitfall for path in FOLDER.glob("*.toml") for pitfall in tomllib.loads(path.read_text(encoding="utf-8"))["pitfall"]
    ]
    return sorted(TypeAdapter(list[Entry]).validate_python(written), key=lambda entry: entry.number)
