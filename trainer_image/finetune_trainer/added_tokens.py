"""Defines preflight's record of the tokens that a job adds to its base model, and adds their rows to the plan.

The plan is frozen before preflight reads the tokenizer and learns the tokens' ids, so later roles read the ids from this record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from finetune_job.added_rows import AddedRows, with_added_rows_trained
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import AddedTokenPlan, RunPlan
from finetune_trainer.errors import ModelError
from finetune_trainer.files import TEMPORARY_MARK, read_own, remove_tree

FIELD = "spec.model.addedTokens"
_NOT_OURS = "start a new job, and let nothing else write to its workspace"
MOST_RECORD_BYTES = 1 << 20
"""Maximum size of a record. 256 tokens of 128 characters take about 300 KB if each character is escaped."""


class AddedTokens(BaseModel):
    """The record of a base model with added tokens. The record is written last, so a model that has one is complete."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tokens: tuple[AddedTokenPlan, ...]
    ids: tuple[int, ...]
    """Ids of the tokens, in the order of `tokens`."""
    num_rows: int
    """Number of rows of the embeddings."""
    has_more_rows: bool
    """Whether the embeddings have more rows than in the original base."""
    embedding: str
    """Last part of the embedding module's path."""
    head: str
    """Last part of the output head's path."""
    separate_head: str | None
    """Name of the output head; None if the head shares the embedding's rows."""

    @model_validator(mode="after")
    def _one_id_each(self) -> Self:
        if len({*self.ids}) != len(self.tokens) or len(self.ids) != len(self.tokens):
            raise ValueError("each token must have an id of its own")
        if min(self.ids, default=0) < 0 or max(self.ids, default=0) >= self.num_rows:
            raise ValueError("each id must be the number of a row")
        return self

    @property
    def id_of(self) -> dict[str, int]:
        """Map each token's text to the token's id."""
        return {token.content: number for token, number in zip(self.tokens, self.ids, strict=True)}


class BaseOrder(BaseModel):
    """The inputs from which a base model with added tokens is made."""

    base: Path
    root: Path
    """Directory that must contain the targets of all symlinks in the base model."""
    tokens: tuple[AddedTokenPlan, ...]
    allow_remote_code: bool
    saved_whole: tuple[str, ...] | None
    """Names of the modules that are trained whole and saved with the adapter; None if there is no adapter."""
    target: Path
    record: Path
    """Path of the record (AddedTokens), which is written last."""

    @classmethod
    def of(cls, plan: RunPlan, **places: Any) -> Self:
        """Make an order from the plan; `places` are the order's other fields."""
        model, method = plan.model, plan.method
        settings = {"tokens": model.added_tokens, "allow_remote_code": model.allow_remote_code}
        return cls(**settings, saved_whole=method.saved_modules if method.trains_adapter else None, **places)


def read_added_tokens(path: Path) -> AddedTokens | None:
    """Read the record; None if there is none. Raises ModelError if it is malformed, and OSError if it cannot be read."""
    try:
        return AddedTokens.model_validate_json(read_own(path, MOST_RECORD_BYTES))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ModelError(f"{path} is not preflight's record of {FIELD} ({error.error_count()} problems)", _NOT_OURS) from error


def remove_made(record: Path, target: Path) -> None:
    """Remove the record, the model with added tokens, and temporary files that a killed process left. Raises OSError.

    The record is removed first, since the model counts as complete as long as the record exists.
    """
    remove_tree(record)
    remove_tree(target)
    for path in (record, target):
        for leftover in path.parent.glob(f"{path.name}{TEMPORARY_MARK}*"):
            remove_tree(leftover)


def known_token(tokens: Sequence[AddedTokenPlan], vocabulary: Mapping[str, int], tokenizer: Any) -> Finding | None:
    """Return a finding if the tokenizer already has one of these tokens, else None. vocabulary: token text -> id."""
    ids = {token.content: _known_id(token.content, vocabulary, tokenizer) for token in tokens}
    known = [content for content, number in ids.items() if number is not None]
    if not known:
        return None
    remaining = [token.written() for token in tokens if token.content not in known]
    return make_finding(
        "added-token-known",
        field=FIELD,
        value=known[0],
        message=f"the tokenizer already has {known[0]!r}, with id {ids[known[0]]} ({len(known)} such tokens)",
        fix="remove it from addedTokens; its row is trained if trainableTokenIndices names it",
        changes={FIELD: remaining or None},
    )


def _known_id(content: str, vocabulary: Mapping[str, int], tokenizer: Any) -> int | None:
    """Id of a known token, or None. Encodes the text too: byte-level vocabularies spell spaces and non-ASCII differently."""
    if content in vocabulary:
        return vocabulary[content]
    ids = tokenizer(content, add_special_tokens=False)["input_ids"]
    return int(ids[0]) if len(ids) == 1 and tokenizer.decode(ids) == content else None


def with_trained_rows(plan: RunPlan, added: AddedTokens) -> RunPlan:
    """Return the plan, extended to train the added tokens' rows of embedding and output head if it does not do so already.

    Raises ModelError if the record lists tokens other than the plan's.
    """
    if added.tokens != plan.model.added_tokens:
        raise ModelError(f"{FIELD}: preflight's record is about other tokens", _NOT_OURS)
    rows = AddedRows(added.ids, added.embedding, added.head, has_separate_head=added.separate_head is not None)
    return plan.model_copy(update={"method": with_added_rows_trained(plan.method, rows)})
