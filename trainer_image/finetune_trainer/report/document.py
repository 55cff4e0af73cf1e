"""The form of `report.json`.

Every text in it comes from outside and every number may, too. Texts are bounded with hidden characters made visible, and
impossible numbers are null.
"""

from __future__ import annotations

import json
import math
import re
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from finetune_trainer.inspection.report import StrictModel

VERSION: Final = 1
"""Version of the form of `report.json`. Removing a field or changing its meaning makes a new version; adding one does not."""
MAX_TEXT, MAX_LONG_TEXT = 300, 1000
"""Largest number of characters of any text, and of prompts, answers and commands."""
MAX_ENTRIES = 200
"""Largest number of entries of any list."""
MOST_NUMBER = 1 << 62
"""Bound of seconds, steps and bytes: larger numbers were not measured, and are left out."""
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""Control characters, those that change the direction of writing, zero-width characters, and lone surrogates."""


def bounded(text: str, most: int = MAX_TEXT) -> str:
    """The first `most` characters and a count of the others, with each hidden character as a replacement character."""
    return _HIDDEN.sub("\ufffd", text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)")


def known_number(value: Any) -> Any:
    """The value, or None if it is no number, not finite, or beyond what can be measured."""
    is_known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_NUMBER
    return value if is_known and math.isfinite(value) else None


def known_count(value: Any) -> Any:
    """The value, or None if it is no integer, negative, or beyond what can be measured."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_NUMBER else None


def _text(value: Any) -> Any:
    return bounded(value) if isinstance(value, str) else value


def _long_text(value: Any) -> Any:
    return bounded(value, MAX_LONG_TEXT) if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_text)]
LongText = Annotated[str, BeforeValidator(_long_text)]
Number = Annotated[float | None, BeforeValidator(known_number)]
Count = Annotated[int | None, BeforeValidator(known_count)]


class OutcomeOfMerge(StrEnum):
    """Outcome of the merge."""

    PASSED = "Passed"
    FAILED = "Failed"
    NOT_MERGED = "NotMerged"


class VerdictOfRun(StrictModel):
    """The outcome, and a sentence for people."""

    outcome: OutcomeOfMerge
    text: str


class LossAtStep(StrictModel):
    """Mean cross-entropy of the held-out records in nats per supervised token; step 0 is before training."""

    step: Count
    loss: Number


class HeldOutLoss(StrictModel):
    """The first measurement, the last, and the lowest."""

    first: LossAtStep
    last: LossAtStep
    best: LossAtStep
    change: Number
    """Change from the first to the last, as a share of the first."""
    has_fallen: bool
    rises_again: bool
    """Whether the last is more than 2 % above the lowest."""


class CurvePoint(StrictModel):
    """One step, or neighbouring steps that are drawn as one: their mean, lowest and highest value."""

    step: Number
    value: Number
    lowest: Number
    highest: Number


class Training(StrictModel):
    """Extent and speed of the training."""

    steps: Count
    tokens: Count
    supervised_tokens: Count
    tokens_per_second: Number
    """Tokens of the median step, over all ranks."""
    calculated_tokens_per_second: Number
    """The planner's figure for the device."""


class AnswerOfModel(StrictModel):
    """A model's answer to a prompt. is_complete: it ended by itself."""

    text: LongText
    is_complete: bool


class SampleAnswer(StrictModel):
    """A held-out record, and both models' answers to its prompt."""

    record: Count
    prompt: LongText
    reference: LongText
    base: AnswerOfModel
    tuned: AnswerOfModel


class SampleAnswers(StrictModel):
    """The answers, or the reason why there are none."""

    answers: tuple[SampleAnswer, ...]
    reason: Text
    max_tokens: Count


class AttemptOfTraining(StrictModel):
    """One process of rank 0. start: seconds since the epoch."""

    number: Count
    start: Number
    seconds: Number
    first_step: Count
    last_step: Count
    lost_steps: Count
    ending: Text
    message: Text


class TimeOfRun(StrictModel):
    """Attempts, and the seconds by activity."""

    attempts: tuple[AttemptOfTraining, ...]
    lost_steps: Count
    goodput: Number
    """Share of the time in steps that count, 0 to 1."""
    productive_seconds: Number
    other_seconds: dict[Text, Number]


class MemoryOfRank(StrictModel):
    """Bytes of the fullest rank."""

    estimate: Count
    terms: dict[Text, int]
    """The parts of the estimate."""
    peak: Count
    limit: Count
    limit_source: Text


class SourceOfRecords(StrictModel):
    """One source and its counts."""

    source: Text
    split: Text
    revision: Text
    weight: Number
    files: Count
    counts: dict[str, Count]


class Warned(StrictModel):
    """A finding of preflight that refused nothing."""

    rule: Text
    message: Text
    fix: Text


class DataCard(StrictModel):
    """Origin of the records, how many were used or dropped, and their lengths."""

    sources: tuple[SourceOfRecords, ...]
    splits: dict[Text, dict[str, Count]]
    record_lengths: dict[str, Count]
    """Number of training records by their largest number of tokens, in ranges that double."""
    warnings: tuple[Warned, ...]


class VerificationOfMerge(StrictModel):
    """The figures that the gate judged; `verification.json` has all of them."""

    passed: bool
    faults: tuple[Text, ...]
    untouched_tensors: Count
    changed_tensors: Count
    relative_difference: Number = None
    max_relative_difference: Number = None
    mean_kl: Number = None
    max_mean_kl: Number = None
    top1_agreement: Number = None
    min_top1_agreement: Number = None
    effect_mean_kl: Number = None
    """KL divergence of the base alone, which is the effect of the adapter."""


class Command(StrictModel):
    """A line of a shell and its purpose."""

    purpose: str
    line: LongText


class Chosen(StrictModel):
    """A value that the manifest left open; null: preflight chose it."""

    field: Text
    value: Text | None
    reason: Text


class RunSummary(StrictModel):
    """Everything in the report."""

    version: Literal[1] = VERSION
    job: dict[str, Text]
    method: str
    model: Text
    revision: Text
    verdict: VerdictOfRun
    held_out_loss: HeldOutLoss | None
    training: Training
    curves: dict[str, tuple[CurvePoint, ...]]
    samples: SampleAnswers
    time: TimeOfRun
    memory: MemoryOfRank | None
    data: DataCard
    verification: VerificationOfMerge | None
    commands: tuple[Command, ...]
    serving_notes: tuple[Text, ...]
    settings: dict[Text, Text]
    choices: tuple[Chosen, ...]
    provenance: dict[Text, Text]
    left_out: dict[str, int]
    """Number of entries that were left out of long lists."""

    def json_text(self) -> str:
        """The summary as valid JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
