"""The most likely continuations of prompts, by models whose weights are in memory one unit at a time (streaming.py).

All prompts and models over the same weights go through together, one token at each pass over the weights. So the cost is known
before: the bytes of the weights times the number of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from finetune_trainer.verify.skeleton import SkeletonModel, element_types, skeleton_model
from finetune_trainer.verify.stored_weights import StoredWeights
from finetune_trainer.verify.streaming import NotStreamableError, StreamedModels, complete
from finetune_trainer.weights.errors import MergeError

BY_LAYER_BYTES = 1 << 30
"""Size of a model whose whole layers fit into memory: it goes through in fewer, larger units, which takes less time."""


class TooLargeError(MergeError):
    """Too few tokens could be generated to be meaningful."""


@dataclass(frozen=True)
class Continued:
    """Models to compare: the weights of `base`, and the same with `adapter`, or those of `tuned` instead."""

    base: Path
    adapter: Path | None
    tuned: Path | None
    allow_remote_code: bool = False


@dataclass(frozen=True)
class Budget:
    """Limits of the cost of answers."""

    most_tokens: int
    least_tokens: int
    most_bytes: int
    """Bytes of weights that may be read."""


def continuations(
    models: Continued, prompts: Sequence[Sequence[int]], stops: Collection[int], budget: Budget, scratch: Path
) -> tuple[int, list[tuple[list[int], list[int]]]]:
    """The largest number of tokens of an answer, and for each prompt the answers of base and tuned model.

    stops: tokens that end an answer. scratch: for what does not fit into memory. Raises TooLargeError, NotStreamableError,
    MergeError, ValueError without an adapter or a tuned model.
    """
    groups = _groups(models)
    size = sum(stored.num_bytes for stored, _ in groups)
    num_tokens = min(budget.most_tokens, budget.most_bytes // max(size, 1))
    if num_tokens < budget.least_tokens:
        raise TooLargeError(
            f"{size / 2**30:,.0f} GiB of weights would be read for each token, and {budget.most_bytes / 2**30:,.0f} GiB are "
            "the most for all answers"
        )
    asked, allow = _Asked(prompts, stops, num_tokens), models.allow_remote_code
    answers: dict[str, list[list[int]]] = {}
    for stored, adapters in groups:
        types = element_types(stored.directory, allow_remote_code=allow)
        for by_layer in (True,) if stored.num_bytes <= BY_LAYER_BYTES else (False, True):
            skeletons = {
                label: skeleton_model(stored, adapter, types, allow_remote_code=allow) for label, adapter in adapters.items()
            }
            try:
                answers |= _answers(asked, stored, skeletons, scratch, by_layer=by_layer)
                break
            # As in the verification, torch refuses some operations on a weight without values.
            except (NotStreamableError, RuntimeError):
                if by_layer:
                    raise
    return num_tokens, list(zip(answers[_BASE], answers[_TUNED], strict=True))


_BASE, _TUNED = "base", "tuned"


@dataclass(frozen=True)
class _Asked:
    """Inputs that are the same for every model. stops: tokens that end an answer."""

    prompts: Sequence[Sequence[int]]
    stops: Collection[int]
    num_tokens: int


def _groups(models: Continued) -> list[tuple[StoredWeights, dict[str, Path | None]]]:
    """Weights that are read together, and the adapter of each model over them."""
    if models.adapter is not None:
        return [(StoredWeights(models.base, None, [models.adapter]), {_BASE: None, _TUNED: models.adapter})]
    if models.tuned is None:
        raise ValueError("there is neither an adapter nor a tuned model")
    return [(StoredWeights(models.base), {_BASE: None}), (StoredWeights(models.tuned), {_TUNED: None})]


def _answers(
    asked: _Asked, stored: StoredWeights, skeletons: Mapping[str, SkeletonModel], scratch: Path, *, by_layer: bool
) -> dict[str, list[list[int]]]:
    """An answer to each prompt, by the model's label."""
    streamed = StreamedModels(stored, skeletons, scratch, by_layer=by_layer)
    answers: dict[str, list[list[int]]] = {label: [[] for _ in asked.prompts] for label in skeletons}
    given: dict[tuple[str, int], Sequence[int]] = {
        (label, number): prompt for label in skeletons for number, prompt in enumerate(asked.prompts)
    }

    def look_up(key: tuple[str, int], tokens: Sequence[int]) -> None:
        given[key] = tokens
        streamed.expect(token for tokens_of_key in given.values() for token in tokens_of_key)

    # One group, since each function reports its lookups for all of them.
    streamed.run(
        [
            [
                partial(_continue, skeletons[label], asked, number, answers[label][number], partial(look_up, (label, number)))
                for label, number in given
            ]
        ]
    )
    return answers


def _continue(
    skeleton: SkeletonModel, asked: _Asked, number: int, answer: list[int], look_up: Callable[[Sequence[int]], None]
) -> None:
    """Append tokens to `answer`. Keys and values of earlier tokens are kept, so that each pass computes one position."""
    known = inspect.signature(type(skeleton.base).forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    cache, step = None, list(asked.prompts[number])
    with torch.inference_mode():
        while True:
            look_up(step)
            result = skeleton.model(input_ids=torch.tensor([step]), past_key_values=cache, use_cache=True, **options)
            token = int(complete(result.logits[:, -1]).argmax())
            answer.append(token)
            if token in asked.stops or len(answer) == asked.num_tokens:
                return
            cache, step = result.past_key_values, [token]
