"""Generates the most likely continuations of prompts, with one unit of a model in memory at a time (streaming.py).

All prompts are continued together, by one token in each pass over the weights. So the cost is known in advance: the bytes of the
weights times the number of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune_trainer.verify.logits import Reference, streamed_models
from finetune_trainer.verify.streaming import StreamedModel
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import read_checkpoint


class TooLargeError(MergeError):
    """The weights are so large that too few tokens could be generated to be meaningful."""


@dataclass(frozen=True)
class Continued:
    """Models to compare: `base` with `base` + `adapter`, or with `tuned` if there is no adapter."""

    base: Path
    adapter: Path | None
    tuned: Path | None
    allow_remote_code: bool = False


@dataclass(frozen=True)
class Budget:
    """Limits on the length and the cost of answers."""

    most_tokens: int
    least_tokens: int
    most_bytes: int
    """Bytes of weights that may be read for all answers."""


def continuations(
    models: Continued, prompts: Sequence[Sequence[int]], stops: Collection[int], budget: Budget
) -> tuple[int, list[tuple[list[int], list[int]]]]:
    """Return the maximum number of tokens of an answer, and the answers of base and tuned model to each prompt.

    stops: tokens that end an answer. Raises TooLargeError, MergeError, RuntimeError for a large model that uses weights
    outside of their layers, and ValueError if there is neither an adapter nor a tuned model.
    """
    allow = models.allow_remote_code
    references = [Reference(models.base, [models.adapter] if models.adapter is not None else [], allow_remote_code=allow)]
    if models.adapter is None:
        if models.tuned is None:
            raise ValueError("there is neither an adapter nor a tuned model")
        references.append(Reference(models.tuned, (), allow_remote_code=allow))
    size = sum((1 + len(model.adapters)) * sum(read_checkpoint(model.base).file_bytes.values()) for model in references)
    num_tokens = min(budget.most_tokens, budget.most_bytes // max(size, 1))
    if num_tokens < budget.least_tokens:
        raise TooLargeError(
            f"{size / 2**30:,.0f} GiB of weights would be read for each token, and at most {budget.most_bytes / 2**30:,.0f} GiB "
            "for all answers"
        )
    base, tuned = (
        _answers(model, prompts, stops, num_tokens) for reference in references for model in streamed_models(reference)
    )
    return num_tokens, list(zip(base, tuned, strict=True))


def _answers(model: StreamedModel, prompts: Sequence[Sequence[int]], stops: Collection[int], num_tokens: int) -> list[list[int]]:
    """Generate answers with transformers. Shorter prompts are padded at the front, and the padding is masked."""
    length = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[*[prompt[0]] * (length - len(prompt)), *prompt] for prompt in prompts])
    is_seen = torch.tensor([[place >= length - len(prompt) for place in range(length)] for prompt in prompts]).long()
    with model.running() as running:
        out = running.generate(
            input_ids=ids,
            attention_mask=is_seen,
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
        )
    first = 1 if model.base.config.is_encoder_decoder else length
    answers = []
    for tokens in (row[first:].tolist() for row in out):
        end = next((place for place, token in enumerate(tokens, start=1) if token in stops), len(tokens))
        answers.append(tokens[:end])
    return answers
