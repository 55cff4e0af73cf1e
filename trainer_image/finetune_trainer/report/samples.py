"""Answers of the base and of the tuned model to held-out prompts, as texts for the report.

Their cost is bounded before they begin, and an error in them costs the report some text, never the run its results.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.data.tokenizer import load_tokenizer
from finetune_trainer.verify.generation import Budget, Continued, TooLargeError, continuations
from finetune_trainer.weights.headers import CONFIG_FILE, read_json

log = logging.getLogger(__name__)
MAX_PROMPT_TOKENS = 256
"""Records with longer prompts are skipped."""
MAX_REFERENCE_TOKENS = 256
TEXT_PROMPT_TOKENS = 32
"""Length of the prompt of a record that is learnt from its beginning; of a short record it is half."""
LOOKED_AT_PER_SAMPLE = 16
"""Number of records that are tried for each sample."""
BUDGET = Budget(most_tokens=24, least_tokens=8, most_bytes=256 << 30)
"""An 8B model in 16 bits gives 17 tokens for it; a model larger than 32 GiB gives none."""
_GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class ModelAnswer:
    """A model's answer to the prompt. is_complete: it ended by itself."""

    text: str
    is_complete: bool


@dataclass(frozen=True)
class Sample:
    """One held-out record. reference: the record's own text after the prompt."""

    record: int
    prompt: str
    reference: str
    base: ModelAnswer
    tuned: ModelAnswer


@dataclass(frozen=True)
class Samples:
    """All samples. reason: why there are none."""

    shown: tuple[Sample, ...] = ()
    reason: str = ""
    max_tokens: int = 0
    """Largest number of tokens of an answer."""


@dataclass(frozen=True)
class Question:
    """A record's tokens, cut where its answer begins."""

    record: int
    prompt: list[int]
    reference: list[int]


def sample_answers(context: RunContext) -> Samples:
    """Samples of a run that has results: as many as the plan asks for."""
    plan = context.plan
    if plan.data.validation is None:
        return Samples(reason="nothing was held out")
    if not plan.sample_answers:
        return Samples(reason="spec.output.sampleAnswers is 0, or was left open for a destination that others may read")
    try:
        return _answers(context)
    except TooLargeError as error:
        return Samples(reason=f"the model is too large for them: {error}")
    except Exception as error:
        # The results are verified and complete; an error in a sample must not fail the run.
        log.warning("no sample answers in the report", exc_info=error)
        return Samples(reason=f"they could not be computed ({type(error).__name__}); the log of the merge says why")


def _answers(context: RunContext) -> Samples:
    plan, output = context.plan, context.output
    split = PreparedSplit.open_held_out(context.workspace.prepared)
    asked = questions(split, plan.sample_answers) if split is not None else []
    if not asked:
        return Samples(reason=f"no held-out record has a prompt of at most {MAX_PROMPT_TOKENS} tokens and an answer")
    tokenizer: Any = load_tokenizer(context.workspace.adapter, plan.model.allow_remote_code)[0]
    special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    stops = stop_tokens(context.base_model, tokenizer.eos_token_id) | {
        question.reference[-1] for question in asked if question.reference[-1] in special
    }
    is_whole = not plan.method.trains_adapter
    models = Continued(
        base=context.base_model,
        adapter=None if is_whole else context.workspace.adapter,
        tuned=output.merged if is_whole or plan.merge.enabled else None,
        allow_remote_code=plan.model.allow_remote_code,
    )
    prompts = [question.prompt for question in asked]
    num_tokens, answers = continuations(models, prompts, stops, BUDGET, context.workspace.root)

    def answer(tokens: Sequence[int]) -> ModelAnswer:
        return ModelAnswer(tokenizer.decode(tokens, skip_special_tokens=True), tokens[-1] in stops)

    samples = [
        Sample(
            question.record,
            tokenizer.decode(question.prompt),
            tokenizer.decode(question.reference[:MAX_REFERENCE_TOKENS], skip_special_tokens=True),
            answer(base),
            answer(tuned),
        )
        for question, (base, tuned) in zip(asked, answers, strict=True)
    ]
    return Samples(tuple(samples), max_tokens=num_tokens)


def questions(split: PreparedSplit, most: int) -> list[Question]:
    """Questions of up to `most` held-out records, spread evenly; the same ones each time."""
    looked_at = min(most * LOOKED_AT_PER_SAMPLE, split.num_documents)
    records = [number * split.num_documents // looked_at for number in range(looked_at)]
    # Distant records first: the first `most` of them are enough if none is skipped.
    far_apart = [record for first in range(LOOKED_AT_PER_SAMPLE) for record in records[first::LOOKED_AT_PER_SAMPLE]]
    cut = (question_of(record, *split.marked_document(record)) for record in far_apart)
    return sorted(islice((each for each in cut if each is not None), most), key=lambda question: question.record)


def question_of(record: int, tokens: Sequence[int], supervised: Sequence[bool]) -> Question | None:
    """The record cut before the first part that is learnt; None without a prompt or an answer, or for a long prompt."""
    first = next((place for place, is_learnt in enumerate(supervised) if is_learnt), len(tokens))
    if first <= 1:  # learnt from the beginning
        first = min(TEXT_PROMPT_TOKENS, len(tokens) // 2)
    last = next((place for place in range(first, len(tokens)) if not supervised[place]), len(tokens))
    if not 0 < first <= MAX_PROMPT_TOKENS or first == last:
        return None
    return Question(record, list(tokens[:first]), list(tokens[first:last]))


def stop_tokens(model: Path, end: int) -> frozenset[int]:
    """Tokens that end generation of the model: `end`, and those that its files name."""
    tokens: set[int] = {end}
    for name in (CONFIG_FILE, _GENERATION_FILE):
        named = read_json(model / name).get("eos_token_id") if (model / name).is_file() else None
        tokens |= {token for token in _listed(named) if isinstance(token, int)}
    return frozenset(tokens)


def _listed(value: object) -> Collection[object]:
    return value if isinstance(value, list) else (value,)
