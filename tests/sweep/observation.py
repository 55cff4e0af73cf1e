"""What came of one case: plain data, kept as JSON."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Outcome = Literal["works", "fails", "wrong", "hangs"]


class Failure(BaseModel):
    """An exception, and where it came from."""

    model_config = ConfigDict(frozen=True)
    stage: str
    """resolve, build, step, evaluation, save, resume, export, merge, or the oracle itself."""
    kind: str
    text: str
    is_own_refusal: bool = False
    """The trainer says no, where a library might go on."""


class Observation(BaseModel):
    """One run through the trainer's code path."""

    model_config = ConfigDict(frozen=True)
    failures: tuple[Failure, ...] = ()
    problems: tuple[str, ...] = ()
    """What is silently wrong."""
    not_compared: tuple[str, ...] = ()
    hung: bool = False
    seconds: dict[str, float] = {}

    @property
    def outcome(self) -> Outcome:
        if self.failures:
            return "fails"
        if self.hung:
            return "hangs"
        return "wrong" if self.problems else "works"

    def text(self) -> str:
        """In one line."""
        if self.failures:
            failure = self.failures[0]
            return f"fails in {failure.stage}: {failure.kind}: {failure.text}"
        return f"{self.outcome}{': ' if self.problems else ''}{'; '.join(self.problems)}"


class Verdict(BaseModel):
    """What a user would be told."""

    model_config = ConfigDict(frozen=True)
    schema_error: str = ""
    rules: tuple[str, ...] = ()
    """Ids of rules that refuse."""
    preflight: tuple[str, ...] = ()
    """Ids of findings about the model that refuse."""
    messages: dict[str, str] = {}
    """By id."""
    fields: dict[str, tuple[str, ...]] = {}
    """By id, the fields under `spec` that are to be changed."""
    crashed: str = ""
    """Exception of the gate itself."""

    @property
    def refused(self) -> bool:
        return bool(self.schema_error or self.rules or self.preflight)

    @property
    def ids(self) -> tuple[str, ...]:
        return ("schema",) * bool(self.schema_error) + self.rules + self.preflight
