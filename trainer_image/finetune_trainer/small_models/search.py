"""Search for the smallest scaled-down copy of a model that can be built and run.

The smallest configuration is tried first. If it does not work, some of the model's own sizes are restored, until a configuration
works or time is up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.model.load import attention_of
from finetune_trainer.small_models.fields import MEANING_OF, TOKEN_ID
from finetune_trainer.small_models.shrink import SmallConfig, shrink, trained_token_ids

log = logging.getLogger(__name__)
MOST_PARAMETERS = 40_000_000
"""Maximum number of parameters of a small model."""
SEARCH_SECONDS = 12.0
_TRIED_TOKENS = 16


class NoSmallModelError(Exception):
    """No working small model could be made; the message says why."""


def find_small_model(plan: RunPlan, config: PreTrainedConfig, described: dict[str, Any]) -> tuple[SmallConfig, PreTrainedModel]:
    """Return the first candidate that works, with random weights in float32. Raises NoSmallModelError."""
    deadline = time.monotonic() + SEARCH_SECONDS
    first_problem = ""
    for shrunken in _candidates(described, trained_token_ids(plan.method)):
        try:
            return shrunken, _build(plan, config, shrunken)
        except Exception as error:  # noqa: BLE001 - any model's code; another size may work
            problem = f"{type(error).__name__}: {error}"
            log.info("no small model with %s: %s", [change.text() for change in shrunken.changes], problem)
            first_problem = first_problem or problem
        if time.monotonic() > deadline:
            break
    raise NoSmallModelError(f"no small model of this architecture could be built; the first attempt failed: {first_problem}")


def _candidates(described: dict[str, Any], named: list[int]) -> Iterator[SmallConfig]:
    """Yield the smallest configuration first, then those with more of the model's own sizes."""
    smallest = shrink(described, named)
    yield smallest
    yield shrink(described, named, of_each_kind=2)
    fields = [change.field for change in smallest.changes if not TOKEN_ID.search(change.field)]
    for field in fields:
        yield shrink(described, named, kept=(field,))
    by_meaning: dict[object, list[str]] = {}
    for field in fields:
        by_meaning.setdefault(MEANING_OF.get(field.rpartition(".")[2]), []).append(field)
    for kept in by_meaning.values():
        if len(kept) > 1:
            yield shrink(described, named, kept=kept)
    half = len(fields) // 2
    for kept in (fields[:half], fields[half:]):
        yield shrink(described, named, kept=kept)


def _build(plan: RunPlan, config: PreTrainedConfig, shrunken: SmallConfig) -> PreTrainedModel:
    """Build the small model with random float32 weights and test a forward and a backward pass. Raises any error of its code."""

    def built(seeded: bool) -> PreTrainedModel:
        if seeded:
            torch.manual_seed(plan.training.seed)
        return AutoModelForCausalLM.from_config(
            type(config).from_dict(shrunken.config),
            dtype=torch.float32,
            attn_implementation=attention_of(plan, config),
            trust_remote_code=plan.model.allow_remote_code,
        )

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in built(seeded=False).parameters())
    if size > MOST_PARAMETERS:
        raise NoSmallModelError(f"it still has {size} parameters")
    model = built(seeded=True)
    model.train()
    allowed = sorted(set(range(shrunken.tokens.size)) - special_tokens(shrunken.config))
    tokens = torch.tensor([allowed[:_TRIED_TOKENS]])
    logits = model(input_ids=tokens, position_ids=torch.arange(tokens.shape[1])[None], use_cache=False).logits
    torch.autograd.backward(logits.float().square().mean())
    model.zero_grad()
    return model


def special_tokens(described: dict[str, Any]) -> set[int]:
    """Return the tokens that a configuration names, except end-of-sequence tokens."""
    special: set[int] = set()
    for name, value in described.items():
        if isinstance(value, dict):
            special |= special_tokens(value)
        elif TOKEN_ID.search(str(name)) and not name.startswith("eos"):
            special |= {token for token in (value if isinstance(value, list) else [value]) if type(token) is int}
    return special
