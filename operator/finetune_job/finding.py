"""The finding of a rule or a check: one model for the rule book, reports, status and the terminal."""

import operator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

MAX_ID_LENGTH = 128
MAX_TEXT_LENGTH = 4096
"""Maximum number of characters of a string in status."""
INVALID_FIELD = "invalid-field"
"""Id of the finding for a field that the schema rejects, or for input that is not an object of this API."""
Severity = Literal["error", "warning"]
TEXTS = ("field", "value", "message", "fix", "source")
"""Fields of a finding whose length is not bounded."""


def _known_severity(severity: object) -> object:
    """Treat an unknown severity, which a later release may have written, as a warning: only errors refuse a job."""
    return severity if severity == "error" or not isinstance(severity, str) else "warning"


# These bounds apply only in the CRD: a finding keeps its full texts until it is shortened for status or a report.
_Id = Annotated[str, Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})]
_Text = Annotated[str, Field(json_schema_extra={"maxLength": MAX_TEXT_LENGTH})]


class FieldChange(BaseModel):
    """One change to the manifest that helps to make it acceptable."""

    model_config = ConfigDict(frozen=True, defer_build=True)
    field: str
    """Path in the object, such as `spec.parallelism.fsdp.useOrigParams`."""
    value: Any
    """New value; None removes the field."""


class Finding(BaseModel):
    """A problem that a rule or preflight found."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    rule: _Id
    severity: Annotated[Severity, BeforeValidator(_known_severity, json_schema_input_type=Severity)]
    field: _Text = ""
    value: _Text = ""
    message: _Text
    """Why the value cannot work, or what it leads to."""
    fix: _Text = ""
    """The remedy."""
    source: _Text = ""
    """The evidence for the finding; empty if the input itself is at fault."""
    changes: SkipJsonSchema[tuple[FieldChange, ...]] = ()
    """The fix as changes that a program can apply; applying all of them clears this finding. Not part of status."""
    is_proposal: SkipJsonSchema[Literal[True] | None] = Field(default=None, exclude_if=operator.not_)
    """Whether the changes contain an example value, because only the manifest's author knows the real one. Not part of status."""

    def shortened(self, limit: int) -> Self:
        """Return this finding for status or a report: no text longer than `limit` characters, and no changes."""
        texts = {name: getattr(self, name)[:limit] for name in TEXTS}
        return self.model_copy(
            update={**texts, "rule": self.rule[: min(limit, MAX_ID_LENGTH)], "changes": (), "is_proposal": None}
        )
