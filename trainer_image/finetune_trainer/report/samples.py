"""Answers of the base model and of the tuned model to held-out prompts, as texts for the report.

The cost of all answers is limited before the first is generated. If one fails, the report has none of them, but the run succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.data.tokenizer import load_tokenizer
from finetune_trainer.files import GENERATION_FILE
from finetune_trainer.report.document import ModelAnswer, Sample, Samples
from finetune_trainer.verify.generation import Budget, Continued, TooLargeError, continuations
from finetune_trainer.weights.headers import CONFIG_FILE, read_json

log = logging.getLogger(__name__)
MAX_PROMPT_TOKENS = 256
"""Records with longer prompts are skipped."""
MAX_REFERENCE_TOKENS = 256
TEXT_PROMPT_TOKENS = 32
"""Prompt length for a record that is learnt from its beginning; a record shorter than twice this is cut in half."""
LOOKED_AT_PER_SAMPLE = 16
"""Number of records that are tried for each sample."""
BUDGET = Budget(most_tokens=24, least_tokens=8, most_bytes=512 << 30)
"""Limits on generating answers. Within them, an 8B model in 16 bits generates 17 tokens, and a model above 32 GiB none."""


@dataclass(frozen=True)
class Question:
    """A record's tokens, cut where its answer begins."""

    record: int
    prompt: list[int]
    reference: list[int]


def sample_answers(context: RunContext) -> Samples:
    """Return samples for a run that has results, at most as many as the plan sets."""
    plan = context.plan
    if plan.data.validation is None:
        return Samples(reason="nothing was held out")
    if not plan.sample_answers:
        return Samples(reason="spec.output.sampleAnswers is 0, the default if other people may be able to read the destination")
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
    num_tokens, answers = continuations(models, prompts, stops, BUDGET)

    def answer(tokens: Sequence[int]) -> ModelAnswer:
        return ModelAnswer(text=tokenizer.decode(tokens, skip_special_tokens=True), is_complete=tokens[-1] in stops)

    samples = [
        Sample(
            record=question.record,
            prompt=tokenizer.decode(question.prompt),
            reference=tokenizer.decode(question.reference[:MAX_REFERENCE_TOKENS], skip_special_tokens=True),
            base=answer(base),
            tuned=answer(tuned),
        )
        for question, (base, tuned) in zip(asked, answers, strict=True)
    ]
    return Samples(answers=tuple(samples), max_tokens=num_tokens)


def questions(split: PreparedSplit, most: int) -> list[Question]:
    """Return questions from up to `most` evenly spread held-out records; each call chooses the same records."""
    looked_at = min(most * LOOKED_AT_PER_SAMPLE, split.num_documents)
    records = [number * split.num_documents // looked_at for number in range(looked_at)]
    # Distant records come first: if none is skipped, the first `most` records are spread evenly.
    far_apart = [record for first in range(LOOKED_AT_PER_SAMPLE) for record in records[first::LOOKED_AT_PER_SAMPLE]]
    cut = (question_of(record, *split.marked_document(record)) for record in far_apart)
    return sorted(islice(filter(None, cut), most), key=lambda question: question.record)


def question_of(record: int, tokens: Sequence[int], supervised: Sequence[bool]) -> Question | None:
    """Split a record where its first learnt part begins; None if the prompt or the answer is empty, or the prompt is too long."""
    first = next((place for place, is_learnt in enumerate(supervised) if is_learnt), len(tokens))
    if first <= 1:  # learnt from the beginning
        first = min(TEXT_PROMPT_TOKENS, len(tokens) // 2)
    last = next((place for place in range(first, len(tokens)) if not supervised[place]), len(tokens))
    if not 0 < first <= MAX_PROMPT_TOKENS or first == last:
        return None
    return Question(record, list(tokens[:first]), list(tokens[first:last]))


def stop_tokens(model: Path, end: int) -> frozenset[int]:
    """Return the tokens that end an answer of the model: `end`, and those that its files name."""
    tokens: set[int] = {end}
    for name in (CONFIG_FILE, GENERATION_FILE):
        named = read_json(model / name).get("eos_token_id") if (model / name).is_file() else None
        tokens |= {token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)}
    return frozenset(tokens)
