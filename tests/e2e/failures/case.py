"""What a case of the table is, what is expected of it, and what came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.e2e.failures.scene import Scene


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that failed, as `status.attempts` has it."""

    role: str
    failure: str
    """Class."""
    counted: bool


@dataclass(frozen=True)
class Expected:
    """Written by hand for each case, from what the documentation promises."""

    final: str
    """The job's phase at the end."""
    failures: tuple[FailedAttempt, ...] = ()
    """All failed attempts, the oldest first."""
    says: str = ""
    """Reason that a condition must show meanwhile; empty where nothing has to be said."""
    resumes: bool = False
    """The next attempt continues from a checkpoint, and repeats no step before it."""


@dataclass(frozen=True)
class Case:
    """Something that breaks."""

    name: str
    what: str
    """For the table: what is done, and what ends it where a human does."""
    expected: Expected
    play: Callable[[Scene], None]
    """Starts a job, breaks something, and follows the job to its end."""
    fixed: bool = False
    """Whether it ends only because somebody fixes it: its seconds count from then."""


@dataclass(frozen=True)
class Outcome:
    """What was seen of a case."""

    final: str
    failures: tuple[FailedAttempt, ...]
    says: str
    resumes: bool
    seconds: float | None
    """From the fault, or from its fix, to the next trained step; None where none is trained any more."""
    seconds_until_said: float | None = None
    """From the fault until `says` was shown."""

    def differences(self, expected: Expected) -> list[str]:
        """What is not as expected, in words."""
        wanted, seen = asdict(expected), asdict(self)
        return [f"{key}: expected {wanted[key]}, found {seen[key]}" for key in wanted if wanted[key] != seen[key]]

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Outcome:
        """The outcome that `asdict` wrote as JSON."""
        return cls(**record | {"failures": tuple(FailedAttempt(**one) for one in record["failures"])})
