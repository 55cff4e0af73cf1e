"""The form of `report.json`.

Every text in it is a stranger's and every number may be one. Texts are bounded and show what is hidden in them, and a number that
nobody can have measured is null.
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
"""Of the form of `report.json`: a field that changes its meaning or goes away makes another; new fields do not."""
MAX_TEXT, MAX_LONG_TEXT = 300, 1000
"""Characters of any text, and of prompts, answers and commands."""
MAX_ENTRIES = 200
"""Of any list."""
MOST_NUMBER = 1 << 62
"""Of seconds, steps and bytes: what is beyond has been written by nobody who measured it, and is left out."""
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""Control characters, those that change the direction of writing, those that take no room, and halves of characters."""


def bounded(text: str, most: int = MAX_TEXT) -> str:
    """At most `most` characters and a count of the others, with each hidden character as a replacement character."""
    return _HIDDEN.sub("\ufffd", text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)")


def known_number(value: Any) -> Any:
    """None for what is no number, not finite, or beyond what can be measured."""
    is_known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_NUMBER
    return value if is_known and math.isfinite(value) else None


def known_count(value: Any) -> Any:
    """The same of what cannot be negative or broken."""
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
    """How the merged model fared."""

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
    """Of the last against the first, as a share of the first."""
    has_fallen: bool
    rises_again: bool
    """The last is more than 2 % above the lowest."""


class CurvePoint(StrictModel):
    """One step, or neighbouring steps that are drawn as one: their mean, lowest and highest value."""

    step: Number
    value: Number
    lowest: Number
    highest: Number


class Training(StrictModel):
    """How far it went and how fast."""

    steps: Count
    tokens: Count
    supervised_tokens: Count
    tokens_per_second: Number
    """Of the median step, over all ranks."""
    calculated_tokens_per_second: Number
    """By the planner for the device."""


class AnswerOfModel(StrictModel):
    """What a model says after a prompt; is_complete: it ended by itself."""

    text: LongText
    is_complete: bool


class SampleAnswer(StrictModel):
    """A held-out record, and what both models say after its prompt."""

    record: Count
    prompt: LongText
    reference: LongText
    base: AnswerOfModel
    tuned: AnswerOfModel


class SampleAnswers(StrictModel):
    """answers, or the reason why there are none."""

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
    """Attempts, and the seconds by what they were spent on."""

    attempts: tuple[AttemptOfTraining, ...]
    lost_steps: Count
    goodput: Number
    """Share of the time in steps that count, 0 to 1."""
    productive_seconds: Number
    other_seconds: dict[Text, Number]


class MemoryOfRank(StrictModel):
    """In bytes, of the fullest rank."""

    estimate: Count
    terms: dict[Text, int]
    """What the estimate is made of."""
    peak: Count
    limit: Count
    limit_source: Text


class SourceOfRecords(StrictModel):
    """One source, and what was found in it."""

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
    """Where the records come from, how many were used or dropped, and how long they are."""

    sources: tuple[SourceOfRecords, ...]
    splits: dict[Text, dict[str, Count]]
    record_lengths: dict[str, Count]
    """Number of training records by the most tokens that they have, in ranges that double."""
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
    """Of the base alone: how much the adapter changes."""


class Command(StrictModel):
    """A line of a shell, and what it is for."""

    purpose: str
    line: LongText


class Chosen(StrictModel):
    """A value that the manifest left open; null: preflight chose it."""

    field: Text
    value: Text | None
    reason: Text


class RunSummary(StrictModel):
    """Everything that the report says."""

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
    """Entries of lists that were too long."""

    def json_text(self) -> str:
        """Valid JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
