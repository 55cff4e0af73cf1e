"""What is known of a local run between two commands: kept with its plan, replaced as a whole."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

from finetune_job.api.status import Restarts
from finetune_job.names import Role


class RunRecord(BaseModel):
    """State of a local run."""

    model_config = ConfigDict(extra="ignore")
    plan_sha256: str
    finished: list[Role] = []
    """Roles that ended with success, in order."""
    next_attempt: dict[Role, int] = {}
    """Number of the next attempt of each role."""
    restarts: dict[Role, Restarts] = {}
    """Of each role: none draws on another's budget."""
    seconds: dict[Role, float] = {}
    """Time that each role has taken over all its attempts."""
    facts: dict[Role, dict[str, str]] = {}
    """What each role reported when it succeeded."""

    @field_validator("restarts", mode="before")
    @classmethod
    def _of_the_gang(cls, value: object) -> object:
        """A record of version 0.1 has one budget for all roles: it is the gang's."""
        return {Role.TRAIN: value} if isinstance(value, dict) and "counted" in value else value


def read_record(path: Path) -> RunRecord | None:
    """The record, or None where there is none or it cannot be read."""
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_record(path: Path, record: RunRecord) -> None:
    """Replace the record."""
    fresh = path.with_suffix(".new")
    fresh.write_text(record.model_dump_json(indent=2))
    fresh.replace(path)
