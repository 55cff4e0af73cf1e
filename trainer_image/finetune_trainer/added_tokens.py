"""What preflight has written down of tokens that a job adds to its base model, and the plan with their rows.

Ids are known once the tokenizer has been read, after the plan is frozen, so every role that follows reads them from the
workspace.
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
"""256 tokens of 128 characters take some 300 KB if each character is escaped."""


class AddedTokens(BaseModel):
    """A base model with added tokens, which is complete once this is there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tokens: tuple[AddedTokenPlan, ...]
    ids: tuple[int, ...]
    """In the order of `tokens`."""
    num_rows: int
    """Of the embeddings."""
    has_more_rows: bool
    """Whether that is more than the base has."""
    embedding: str
    """The end of the path of the module."""
    head: str
    """The same of the output head."""
    separate_head: str | None
    """That, if it does not share the embedding's rows."""

    @model_validator(mode="after")
    def _one_id_each(self) -> Self:
        if len({*self.ids}) != len(self.tokens) or len(self.ids) != len(self.tokens):
            raise ValueError("each token has one id")
        if min(self.ids, default=0) < 0 or max(self.ids, default=0) >= self.num_rows:
            raise ValueError("ids are numbers of rows")
        return self

    @property
    def id_of(self) -> dict[str, int]:
        """By the tokens' texts."""
        return {token.content: number for token, number in zip(self.tokens, self.ids, strict=True)}


class BaseOrder(BaseModel):
    """A base model with added tokens that is to be made, and of what."""

    base: Path
    root: Path
    """Below which links of the base may lead."""
    tokens: tuple[AddedTokenPlan, ...]
    allow_remote_code: bool
    saved_whole: tuple[str, ...] | None
    """Names of modules that the adapter holds whole; None: there is no adapter."""
    target: Path
    record: Path
    """Where AddedTokens is written, last of all."""

    @classmethod
    def of(cls, plan: RunPlan, **places: Any) -> Self:
        """What the plan says, and the other fields."""
        model, method = plan.model, plan.method
        told = {"tokens": model.added_tokens, "allow_remote_code": model.allow_remote_code}
        return cls(**told, saved_whole=method.saved_modules if method.trains_adapter else None, **places)


def read_added_tokens(path: Path) -> AddedTokens | None:
    """None if preflight has not written it. Raises ModelError if it is not what preflight writes, OSError."""
    try:
        return AddedTokens.model_validate_json(read_own(path, MOST_RECORD_BYTES))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ModelError(
            f"{path}: is not what preflight writes about {FIELD} ({error.error_count()} problems)",
            _NOT_OURS,
        ) from error


def remove_made(record: Path, target: Path) -> None:
    """Remove what has these names: the record first, without which the model is not complete; and what a process that was killed
    had made of it. Raises OSError.
    """
    remove_tree(record)
    remove_tree(target)
    for path in (record, target):
        for leftover in path.parent.glob(f"{path.name}{TEMPORARY_MARK}*"):
            remove_tree(leftover)


def known_token(tokens: Sequence[AddedTokenPlan], vocabulary: Mapping[str, int], tokenizer: Any) -> Finding | None:
    """A token that is to be added and that the tokenizer has already. vocabulary: its ids by text."""
    ids = {token.content: _known_id(token.content, vocabulary, tokenizer) for token in tokens}
    known = [content for content, number in ids.items() if number is not None]
    if not known:
        return None
    left = [token.written() for token in tokens if token.content not in known]
    return make_finding(
        "added-token-known",
        field=FIELD,
        value=known[0],
        message=f"the tokenizer has {known[0]!r} already, as {ids[known[0]]} ({len(known)} such tokens)",
        fix="remove it from addedTokens; its row is trained if trainableTokenIndices names it",
        changes={FIELD: left or None},
    )


def _known_id(content: str, vocabulary: Mapping[str, int], tokenizer: Any) -> int | None:
    """Vocabularies of bytes write a space and all beyond ASCII otherwise than texts do, so the text is read, too."""
    if content in vocabulary:
        return vocabulary[content]
    ids = tokenizer(content, add_special_tokens=False)["input_ids"]
    return int(ids[0]) if len(ids) == 1 and tokenizer.decode(ids) == content else None


def with_trained_rows(plan: RunPlan, added: AddedTokens) -> RunPlan:
    """The plan that trains the rows of the added tokens, of embedding and output head, as far as nothing else trains these.

    Raises ModelError if they are not the plan's.
    """
    if added.tokens != plan.model.added_tokens:
        raise ModelError(f"{FIELD}: what preflight has written down is of other tokens", _NOT_OURS)
    rows = AddedRows(added.ids, added.embedding, added.head, has_separate_head=added.separate_head is not None)
    return plan.model_copy(update={"method": with_added_rows_trained(plan.method, rows)})
