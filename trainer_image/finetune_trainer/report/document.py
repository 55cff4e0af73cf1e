"""The format of `report.json`.

All of its texts and some of its numbers are untrusted. So texts are cut to a maximum length, hidden characters are made visible,
and impossible numbers become null.
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
"""Version of this format. It is raised if a field is removed or changes its meaning, but not if a field is added."""
MAX_TEXT, MAX_LONG_TEXT = 300, 1000
"""Maximum number of characters of most texts, and of long ones: prompts, answers and commands."""
_LONGEST_NOTE = 40
"""Maximum length of the note that says how many characters were left out."""
MAX_ENTRIES = 200
"""Maximum number of entries of any list."""
MOST_NUMBER = 1 << 62
"""Upper bound of seconds, steps and bytes. A larger number cannot have been measured, and is left out."""
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""Control characters, characters that change the direction of writing, zero-width characters, and lone surrogates."""


def bounded(text: str, most: int = MAX_TEXT) -> str:
    """Return the first `most` characters and a count of the rest. Hidden characters become replacement characters.

    A text that is only a little longer than `most` stays whole, so that a result of this function is not cut again.
    """
    is_whole = len(text) <= most + _LONGEST_NOTE
    return _HIDDEN.sub("\ufffd", text if is_whole else f"{text[:most]} … ({len(text) - most:,} more characters)")


def known_number(value: Any) -> Any:
    """Return the value, or None if it is not a finite number or is too large to have been measured."""
    is_known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_NUMBER
    return value if is_known and math.isfinite(value) else None


def known_count(value: Any) -> Any:
    """Return the value, or None if it is not an integer, is negative, or is too large to have been measured."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_NUMBER else None


Text = Annotated[str, BeforeValidator(lambda value: bounded(value) if isinstance(value, str) else value)]
LongText = Annotated[str, BeforeValidator(lambda value: bounded(value, MAX_LONG_TEXT) if isinstance(value, str) else value)]
Number = Annotated[float | None, BeforeValidator(known_number)]
Count = Annotated[int | None, BeforeValidator(known_count)]


class OutcomeOfMerge(StrEnum):
    """Outcome of the merge."""

    PASSED = "Passed"
    FAILED = "Failed"
    NOT_MERGED = "NotMerged"


class VerdictOfRun(StrictModel):
    """The outcome of the run, and a sentence about it for people."""

    outcome: OutcomeOfMerge
    text: str


class LossAtStep(StrictModel):
    """Mean cross-entropy of the held-out records in nats per supervised token; step 0 is before training."""

    step: Count
    loss: Number


class HeldOutLoss(StrictModel):
    """The first, the last and the lowest held-out loss."""

    first: LossAtStep
    last: LossAtStep
    best: LossAtStep
    change: Number
    """Change from the first loss to the last, as a share of the first."""
    has_fallen: bool
    rises_again: bool
    """Whether the last loss is more than 2 % above the lowest."""


class CurvePoint(StrictModel):
    """One step, or neighbouring steps that are drawn as one point: their mean, lowest and highest values."""

    step: Number
    value: Number
    lowest: Number
    highest: Number


class Training(StrictModel):
    """Amount and speed of the training."""

    steps: Count
    tokens: Count
    supervised_tokens: Count
    tokens_per_second: Number
    """Tokens per second in the median step, over all ranks."""
    calculated_tokens_per_second: Number
    """The tokens per second that the planner calculated for the device."""


class ModelAnswer(StrictModel):
    """A model's answer to a prompt. is_complete: whether the model ended the answer itself."""

    text: LongText
    is_complete: bool


class Sample(StrictModel):
    """Both models' answers to the prompt of a held-out record. reference: the record's own text after the prompt."""

    record: Count
    prompt: LongText
    reference: LongText
    base: ModelAnswer
    tuned: ModelAnswer


class Samples(StrictModel):
    """The sample answers, or the reason why there are none."""

    answers: tuple[Sample, ...] = ()
    reason: Text = ""
    max_tokens: Count = 0
    """Maximum number of tokens of an answer."""


class TrainingAttempt(StrictModel):
    """One process of rank 0 from start to end."""

    number: Count
    start: Number
    """Seconds since the epoch."""
    seconds: Number
    """Seconds from the start of the process to its last record."""
    first_step: Count
    """Step after which this attempt continued."""
    last_step: Count
    """Step of the last record of this attempt."""
    lost_steps: Count
    """Number of recorded steps of this attempt that the next attempt had to do again."""
    ending: Text
    message: Text = ""
    """Message of the failure."""


class TimeOfRun(StrictModel):
    """The attempts, and the seconds spent on each activity."""

    attempts: tuple[TrainingAttempt, ...]
    lost_steps: Count
    goodput: Number
    """Share of the time that was spent in steps that count, 0 to 1."""
    productive_seconds: Number
    other_seconds: dict[Text, Number]


class MemoryOfRank(StrictModel):
    """Memory of the rank that needs the most, in bytes."""

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
    """A warning of preflight."""

    rule: Text
    message: Text
    fix: Text


class DataCard(StrictModel):
    """Origin of the records, how many were used or dropped, and their lengths."""

    sources: tuple[SourceOfRecords, ...]
    splits: dict[Text, dict[str, Count]]
    record_lengths: dict[str, Count]
    """Histogram of the lengths of training records in tokens: upper end of a range -> number of records. Upper ends double."""
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
    """Mean KL divergence of the base model without the adapter, which shows the adapter's effect."""


class Command(StrictModel):
    """A shell command and its purpose."""

    purpose: str
    line: LongText


class Chosen(StrictModel):
    """A value chosen for a field that the manifest left unset. null: preflight chose it."""

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
    samples: Samples
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
    """Number of entries that were left out of each long list, by the list's name."""

    def json_text(self) -> str:
        """Return the summary as valid JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
