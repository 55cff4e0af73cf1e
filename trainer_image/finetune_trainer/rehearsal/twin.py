"""Builds the twin: a small model of the same architecture class with random weights, its data, and the plan to train it.

Tries the smallest configuration first. One that cannot be built or computed is given some of the model's own sizes back, until one
works or time is up. Runs in a child of run.py.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.merge.headers import read_checkpoint
from finetune_trainer.model.load import attention_of, load_config, stored_dtype
from finetune_trainer.preflight.meta_model import inspect_structure
from finetune_trainer.rehearsal.fields import MEANING_OF, TOKEN_ID
from finetune_trainer.rehearsal.layers import layer_count
from finetune_trainer.rehearsal.places import Places
from finetune_trainer.rehearsal.shrink import Change, Shrunken, Tokens, has_dropout, shrink, without_dropout
from finetune_trainer.rehearsal.tiny_data import tiny_splits
from finetune_trainer.rehearsal.twin_plan import draws_random_numbers, named_tokens, twin_plan, twin_tokens, without_unmatched

log = logging.getLogger(__name__)
OWN_TWIN_PARAMETERS, OWN_TWIN_LAYERS = 4_000_000, 6
"""A model of at most this size is tried as it is."""
MOST_PARAMETERS = 40_000_000
"""Of a twin."""
SEARCH_SECONDS = 12.0
_UNMATCHED = frozenset({"target-module-unknown", "saved-module-unknown", "adapter-pattern-unmatched", "layer-number-unknown"})
_TRIED_TOKENS = 16


class NoTwinError(Exception):
    """No small model that works could be made of this one; the message says why."""


@dataclass(frozen=True)
class Twin:
    """What the other children need to know."""

    plan: RunPlan
    changes: tuple[Change, ...]
    parameters: int
    draws_random_numbers: bool
    """Whether it has dropout, so that a second model without is compared with one process."""


def make_twin(plan: RunPlan, directory: Path, places: Places) -> Twin:
    """Write the twin's model and data to their places. Raises NoTwinError, and TrainerError for a model that is not accepted."""
    config = load_config(plan, directory)
    described = config.to_dict()
    parameters = sum(math.prod(header.shape) for header in read_checkpoint(directory).tensors.values())
    text = config.get_text_config().to_dict()
    if parameters <= OWN_TWIN_PARAMETERS and (layer_count(text) or 0) <= OWN_TWIN_LAYERS:
        places.model.symlink_to(directory.absolute(), target_is_directory=True)
        shrunken = None
        tokens = Tokens(int(text["vocab_size"]))
    else:
        shrunken, model = search(plan, config, described)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        tokens = shrunken.tokens
        _write(model, directory, places.model, stored_dtype(directory))
        described = shrunken.config
        del model
    twin, changes = twin_plan(plan, shrunken)
    if shrunken is not None:
        twin = _accepted(twin, places.model, changes)
    # What images and the like are put in place of is no text.
    special = _special_tokens(described)
    splits = tiny_splits(twin, tokens.size, special, twin_tokens(tokens, plan.method))
    pad = text.get("pad_token_id")
    facts = {"pad_token_id": tokens.twin_of(pad) if type(pad) is int and pad >= 0 else 0, "splits": sorted(splits)}
    write_prepared(places.prepared, splits, facts)
    is_random = has_dropout(described)
    if is_random:
        _write_quiet(config, described, places)
    shown = (*(shrunken.changes if shrunken is not None else ()), *changes)
    return Twin(twin, shown, parameters, is_random or draws_random_numbers(plan.method))


def search(plan: RunPlan, config: PreTrainedConfig, described: dict[str, Any]) -> tuple[Shrunken, PreTrainedModel]:
    """The smallest twin that works, with random weights in float32. Raises NoTwinError."""
    deadline = time.monotonic() + SEARCH_SECONDS
    first_problem = ""
    for shrunken in _candidates(described, named_tokens(plan.method)):
        try:
            return shrunken, _build(plan, config, shrunken)
        except Exception as error:  # noqa: BLE001 - code of any model; another size may do
            problem = f"{type(error).__name__}: {error}"
            log.info("no twin with %s: %s", [change.text() for change in shrunken.changes], problem)
            first_problem = first_problem or problem
        if time.monotonic() > deadline:
            break
    raise NoTwinError(f"no small model of this architecture could be built; the first that was tried: {first_problem}")


def _candidates(described: dict[str, Any], named: list[int]) -> Iterator[Shrunken]:
    """The smallest first; then with more of the model's own sizes."""
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


def _build(plan: RunPlan, config: PreTrainedConfig, shrunken: Shrunken) -> PreTrainedModel:
    """The twin with random weights in float32, after a forward and a backward pass of it. Raises whatever its code raises."""

    def made(seeded: bool) -> PreTrainedModel:
        if seeded:
            torch.manual_seed(plan.training.seed)
        return AutoModelForCausalLM.from_config(
            type(config).from_dict(shrunken.config),
            dtype=torch.float32,
            attn_implementation=attention_of(plan, config),
            trust_remote_code=plan.model.allow_remote_code,
        )

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in made(seeded=False).parameters())
    if size > MOST_PARAMETERS:
        raise NoTwinError(f"it still has {size} parameters")
    model = made(seeded=True)
    model.train()
    allowed = sorted(set(range(shrunken.tokens.size)) - _special_tokens(shrunken.config))
    tokens = torch.tensor([allowed[:_TRIED_TOKENS]])
    logits = model(input_ids=tokens, position_ids=torch.arange(tokens.shape[1])[None], use_cache=False).logits
    torch.autograd.backward(logits.float().square().mean())
    model.zero_grad()
    return model


def _write(model: PreTrainedModel, directory: Path, target: Path, dtype: torch.dtype) -> None:
    model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(target)
    for code in directory.glob("*.py"):
        shutil.copyfile(code, target / code.name)


def _write_quiet(config: PreTrainedConfig, described: dict[str, Any], places: Places) -> None:
    """The same weights without dropout."""
    places.quiet_model.mkdir()
    for path in places.model.iterdir():
        if path.name != "config.json":
            (places.quiet_model / path.name).symlink_to(path.resolve())
    quiet = without_dropout(described)
    made = type(config).from_dict(quiet)
    made.architectures = config.architectures
    made.save_pretrained(places.quiet_model)


def _accepted(twin: RunPlan, model: Path, changes: list[Change]) -> RunPlan:
    """The plan, as preflight accepts it for the twin: without names of layers that it does not have. Raises NoTwinError."""
    _, findings = inspect_structure(twin, model)
    unmatched = [finding.value for finding in findings if finding.rule in _UNMATCHED]
    if unmatched:
        twin = twin.model_copy(update={"method": without_unmatched(twin.method, unmatched, changes)})
        _, findings = inspect_structure(twin, model)
    for finding in findings:
        if finding.severity == "error":
            raise NoTwinError(f"the settings fit the model and not its twin: {finding.field}: {finding.message}")
    return twin


def _special_tokens(described: dict[str, Any]) -> set[int]:
    """Tokens that a configuration names, those that end a text excepted."""
    found: set[int] = set()
    for name, value in described.items():
        if isinstance(value, dict):
            found |= _special_tokens(value)
        elif TOKEN_ID.search(str(name)) and not name.startswith("eos"):
            found |= {each for each in (value if isinstance(value, list) else [value]) if type(each) is int}
    return found
