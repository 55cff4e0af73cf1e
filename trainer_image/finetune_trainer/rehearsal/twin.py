"""Builds the twin: a small model of the same architecture class with random weights, its data, and the plan to train it.

Runs in a child of run.py.
"""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.model.load import load_config, stored_dtype
from finetune_trainer.preflight.model_checks import inspect_structure
from finetune_trainer.rehearsal.places import Places
from finetune_trainer.rehearsal.tiny_data import tiny_splits
from finetune_trainer.rehearsal.twin_plan import draws_random_numbers, twin_plan, twin_tokens, without_unmatched
from finetune_trainer.rehearsal.units import with_units_alike
from finetune_trainer.small_models.layers import layer_count
from finetune_trainer.small_models.search import NoTwinError, search, special_tokens
from finetune_trainer.small_models.shrink import Change, Tokens, has_dropout, without_dropout
from finetune_trainer.weights.headers import read_checkpoint

log = logging.getLogger(__name__)
OWN_TWIN_PARAMETERS, OWN_TWIN_LAYERS = 4_000_000, 6
"""A model of at most this size is tried as it is."""
_UNMATCHED = frozenset({"target-module-unknown", "saved-module-unknown", "adapter-pattern-unmatched", "layer-number-unknown"})


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
        if type(model.config) is not type(config):
            _name_whole(config, shrunken.config, model, places.model)
        described = shrunken.config
        del model
    twin, changes = twin_plan(plan, shrunken)
    if shrunken is not None:
        twin = _accepted(twin, places.model, changes)
        twin = with_units_alike(twin, plan, directory, places.model, changes)
    # What images and the like are put in place of is no text.
    special = special_tokens(described)
    splits = tiny_splits(twin, tokens.size, special, twin_tokens(tokens, plan.method))
    pad = text.get("pad_token_id")
    facts = {"pad_token_id": tokens.twin_of(pad) if type(pad) is int and pad >= 0 else 0, "splits": sorted(splits)}
    write_prepared(places.prepared, splits, facts)
    is_random = has_dropout(described)
    if is_random:
        _write_quiet(config, described, places)
    shown = (*(shrunken.changes if shrunken is not None else ()), *changes)
    return Twin(twin, shown, parameters, is_random or draws_random_numbers(plan.method))


def _write(model: PreTrainedModel, directory: Path, target: Path, dtype: torch.dtype) -> None:
    model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(target)
    for code in directory.glob("*.py"):
        shutil.copyfile(code, target / code.name)


def _name_whole(config: PreTrainedConfig, described: dict[str, Any], model: PreTrainedModel, target: Path) -> None:
    """Let the twin of a text part be found by the configuration of the whole, where transformers knows it by no other (mllama)."""
    if type(model.config) in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - there is no public name
        return
    made = type(config).from_dict(described)
    made.architectures = [type(model).__name__]
    made.dtype = model.dtype
    made.save_pretrained(target)


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
    findings = inspect_structure(twin, model).findings
    unmatched = [finding.value for finding in findings if finding.rule in _UNMATCHED]
    if unmatched:
        twin = twin.model_copy(update={"method": without_unmatched(twin.method, unmatched, changes)})
        findings = inspect_structure(twin, model).findings
    for finding in findings:
        if finding.severity == "error":
            raise NoTwinError(f"the settings fit the model and not its twin: {finding.field}: {finding.message}")
    return twin
