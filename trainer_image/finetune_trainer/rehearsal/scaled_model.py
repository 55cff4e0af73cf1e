"""Builds the scaled-down model of a rehearsal, of the same architecture and with random weights, its data and its plan.

Runs in a child of run.py. All files of a rehearsal are in one temporary directory (see RehearsalPaths).
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune_job.api.inputs import LossOn
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.layout import WorkspaceLayout
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.run_plan import FsdpPlan, RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, VALIDATION, SplitArrays
from finetune_trainer.inspection.skeleton import attach_skeleton_adapters, load_skeleton
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.load import load_config, pack_layers, packed_dtype, stored_dtype
from finetune_trainer.model.wrap_plan import unit_names
from finetune_trainer.preflight.model_checks import inspect_structure
from finetune_trainer.rehearsal.scaled_plan import (
    MODEL_CLAIM,
    OUTPUT_CLAIM,
    STEPS,
    UNSCALED_LAYERS,
    UNSCALED_PARAMETERS,
    WORKSPACE_CLAIM,
    draws_random_numbers,
    scaled_plan,
    scaled_tokens,
    without_unmatched,
)
from finetune_trainer.small_models.layers import layer_count
from finetune_trainer.small_models.search import NoSmallModelError, find_small_model, special_tokens
from finetune_trainer.small_models.shrink import ConfigChange, Tokens, has_dropout, without_dropout
from finetune_trainer.weights.headers import read_checkpoint

log = logging.getLogger(__name__)
SHORTEST, LONGEST = 6, 16
"""Tokens of a document."""
DOCUMENTS_PER_SEQUENCE = 3
HELD_OUT = 4
_NAMED_PER_DOCUMENT = 2
_FIELD = "parallelism.fsdp.minNumParams"
_UNMATCHED = frozenset({"target-module-unknown", "saved-module-unknown", "adapter-pattern-unmatched", "layer-number-unknown"})


@dataclass(frozen=True)
class ScaledModel:
    """What the other children need to know."""

    plan: RunPlan
    changes: tuple[ConfigChange, ...]
    parameters: int
    draws_random_numbers: bool
    """Whether it has dropout, so that a second model without is compared with one process."""


def make_scaled_model(plan: RunPlan, directory: Path, paths: RehearsalPaths) -> ScaledModel:
    """Write model and data to their paths. Raises NoSmallModelError, and TrainerError for a model that is not accepted."""
    config = load_config(plan, directory)
    described = config.to_dict()
    parameters = sum(math.prod(header.shape) for header in read_checkpoint(directory).tensors.values())
    text = config.get_text_config().to_dict()
    if parameters <= UNSCALED_PARAMETERS and (layer_count(text) or 0) <= UNSCALED_LAYERS:
        paths.model.symlink_to(directory.absolute(), target_is_directory=True)
        shrunken = None
        tokens = Tokens(int(text["vocab_size"]))
    else:
        shrunken, model = find_small_model(plan, config, described)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        tokens = shrunken.tokens
        _write(model, directory, paths.model, stored_dtype(directory))
        if type(model.config) is not type(config):
            _name_whole(config, shrunken.config, model, paths.model)
        described = shrunken.config
        del model
    scaled, changes = scaled_plan(plan, shrunken)
    if shrunken is not None:
        scaled = _accepted(scaled, paths.model, changes)
        scaled = with_matching_units(scaled, plan, directory, paths.model, changes)
    # Tokens that images and the like replace are not text.
    special = special_tokens(described)
    splits = tiny_splits(scaled, tokens.size, special, scaled_tokens(tokens, plan.method))
    pad = text.get("pad_token_id")
    facts = {"pad_token_id": tokens.kept_token_of(pad) if type(pad) is int and pad >= 0 else 0, "splits": sorted(splits)}
    write_prepared(paths.prepared, splits, facts)
    is_random = has_dropout(described)
    if is_random:
        _write_quiet(config, described, paths)
    shown = (*(shrunken.changes if shrunken is not None else ()), *changes)
    return ScaledModel(scaled, shown, parameters, is_random or draws_random_numbers(plan.method))


def _write(model: PreTrainedModel, directory: Path, target: Path, dtype: torch.dtype) -> None:
    model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(target)
    for code in directory.glob("*.py"):
        shutil.copyfile(code, target / code.name)


def _name_whole(config: PreTrainedConfig, described: dict[str, Any], model: PreTrainedModel, target: Path) -> None:
    """Save a text part under the configuration of the whole if transformers finds its class by no other (mllama)."""
    if type(model.config) in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - there is no public name
        return
    made = type(config).from_dict(described)
    made.architectures = [type(model).__name__]
    made.dtype = model.dtype
    made.save_pretrained(target)


def _write_quiet(config: PreTrainedConfig, described: dict[str, Any], paths: RehearsalPaths) -> None:
    """The same weights without dropout."""
    paths.quiet_model.mkdir()
    for path in paths.model.iterdir():
        if path.name != "config.json":
            (paths.quiet_model / path.name).symlink_to(path.resolve())
    quiet = without_dropout(described)
    made = type(config).from_dict(quiet)
    made.architectures = config.architectures
    made.save_pretrained(paths.quiet_model)


def _accepted(scaled: RunPlan, model: Path, changes: list[ConfigChange]) -> RunPlan:
    """The plan as preflight accepts it: without names of layers that the model does not have. Raises NoSmallModelError."""
    findings = inspect_structure(scaled, model).findings
    unmatched = [finding.value for finding in findings if finding.rule in _UNMATCHED]
    if unmatched:
        scaled = scaled.model_copy(update={"method": without_unmatched(scaled.method, unmatched, changes)})
        findings = inspect_structure(scaled, model).findings
    for finding in findings:
        if finding.severity == "error":
            raise NoSmallModelError(f"the settings fit the model and not the scaled-down one: {finding.field}: {finding.message}")
    return scaled


@dataclass(frozen=True)
class RehearsalPaths:
    """Paths of a rehearsal.

    root/
        model/, quiet-model/   the scaled-down model, and the same weights without dropout
        prepared/              its data
        <run>/                 the claims of a run: model and prepared data are links to those above
    """

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def quiet_model(self) -> Path:
        return self.root / "quiet-model"

    @property
    def prepared(self) -> Path:
        return self.root / "prepared"

    def run(self, name: str, plan: RunPlan, *, quiet: bool = False) -> RunContext:
        """The claims of a run, made when they are first asked for. Runs of one plan differ in nothing but their paths."""
        root = self.root / name
        if not root.exists():
            workspace = root / WORKSPACE_CLAIM
            workspace.mkdir(parents=True)
            (root / OUTPUT_CLAIM).mkdir()
            model = self.quiet_model if quiet and self.quiet_model.exists() else self.model
            (root / MODEL_CLAIM).symlink_to(model.absolute(), target_is_directory=True)
            WorkspaceLayout(workspace).prepared.symlink_to(self.prepared.absolute(), target_is_directory=True)
        # The scaled-down model may be links to the job's own, of which preflight has seen where they lead.
        return RunContext(plan, plan_sha256(plan), root, attempt=0, links_lead_to=Path("/"))


def tiny_splits(plan: RunPlan, vocabulary: int, avoided: Collection[int], named: Collection[int]) -> dict[str, SplitArrays]:
    """`vocabulary`: rows of the embedding; `avoided`: tokens that stand for more than text; `named`: tokens that the job
    trains.
    """
    allowed = np.array(sorted(set(range(min(vocabulary, 1 << 16))) - set(avoided)) or [0])
    random = np.random.default_rng(plan.training.seed)
    splits = {TRAIN: _split(plan, STEPS * plan.training.global_batch_size, allowed, sorted(named), random)}
    if plan.data.validation is not None:
        splits[VALIDATION] = _split(plan, HELD_OUT, allowed, sorted(named), random)
    return splits


def _split(plan: RunPlan, num_sequences: int, allowed: np.ndarray, named: list[int], random: np.random.Generator) -> SplitArrays:
    longest = max(2, min(LONGEST, plan.data.max_sequence_length))
    tokens: list[int] = []
    supervised: list[bool] = []
    document_ends, sequence_ends, supervised_tokens = [], [], []
    # The first is never supervised, because the token before it is another document's.
    skipped = 1 if plan.data.loss_on is LossOn.ALL else 2
    for _ in range(num_sequences):
        start = len(supervised)
        left = plan.data.max_sequence_length
        for _ in range(int(random.integers(1, DOCUMENTS_PER_SEQUENCE + 1)) if plan.data.packing else 1):
            length = min(int(random.integers(min(SHORTEST, longest), longest + 1)), left)
            if length < 2:
                break
            left -= length
            document = random.choice(allowed, length)
            for number in range(min(_NAMED_PER_DOCUMENT if named else 0, length - 1)):
                document[number] = named[int(random.integers(len(named)))]
            tokens += [int(token) for token in document]
            supervised += [number >= min(skipped, length - 1) for number in range(length)]
            document_ends.append(len(tokens))
        sequence_ends.append(len(document_ends))
        supervised_tokens.append(sum(supervised[start:]))
    return SplitArrays(
        np.array(tokens), np.array(supervised), np.array(document_ends), np.array(sequence_ends), np.array(supervised_tokens)
    )


def with_matching_units(
    scaled: RunPlan, plan: RunPlan, directory: Path, scaled_directory: Path, changes: list[ConfigChange]
) -> RunPlan:
    """The plan with a `minNumParams` for the sizes of the scaled-down model, noted in `changes`. Reads no weights."""
    fsdp = plan.parallelism.fsdp
    if fsdp.auto_wrap_policy is not AutoWrapPolicy.SIZE_BASED_WRAP or scaled.parallelism.world_size == 1:
        return scaled
    wanted = unit_kinds(unit_names(trained_without_weights(plan, directory), _by_size(fsdp)))
    minimum, found = nearest_minimum(trained_without_weights(scaled, scaled_directory), wanted, fsdp)
    changes.append(ConfigChange(_FIELD, fsdp.min_num_params or "the default", minimum))
    if found != wanted:
        changes.append(ConfigChange("units by size that differ", sorted(wanted - found), sorted(found - wanted)))
    sharded = scaled.parallelism.model_copy(
        update={"fsdp": scaled.parallelism.fsdp.model_copy(update={"min_num_params": minimum})}
    )
    return scaled.model_copy(update={"parallelism": sharded})


def nearest_minimum(model: nn.Module, wanted: Collection[str], fsdp: FsdpPlan) -> tuple[int, set[str]]:
    """The least size with the fewest kinds of units too many or too few, and the kinds that it gives."""
    candidates = [(minimum, unit_kinds(units)) for minimum, units in _choices(model, fsdp)]
    return min(candidates, key=lambda candidate: len(candidate[1] ^ set(wanted)))


def unit_kinds(units: Collection[str]) -> set[str]:
    """Names of units without the numbers of layers and experts."""
    return {".".join(part for part in name.split(".") if not part.isdigit()) for name in units}


def _choices(model: nn.Module, fsdp: FsdpPlan) -> Iterator[tuple[int, list[str]]]:
    """Every choice of units that some size gives, with the least such size, up to none at all."""
    minimum = 1
    while True:
        units = unit_names(model, _by_size(fsdp, minimum))
        yield minimum, units
        if not units:
            return
        # The same units are chosen until the smallest of them is too small.
        minimum = min(_held_alone(model, units).values()) + 1


def _held_alone(model: nn.Module, units: Collection[str]) -> dict[str, int]:
    """Numbers of parameters of each unit that no unit below it holds."""
    counts = {}
    for unit in units:
        below = [model.get_submodule(other) for other in units if other.startswith(f"{unit}.")]
        held = {id(parameter) for module in below for parameter in module.parameters()}
        counts[unit] = sum(parameter.numel() for parameter in model.get_submodule(unit).parameters() if id(parameter) not in held)
    return counts


def _by_size(fsdp: FsdpPlan, minimum: int | None = None) -> FsdpPlan:
    """Without trainable leaves, which are units whatever their size."""
    minimum = fsdp.min_num_params if minimum is None else minimum
    return fsdp.model_copy(update={"min_num_params": minimum, "peft_wrap_policy": False})


def trained_without_weights(plan: RunPlan, directory: Path) -> nn.Module:
    """The model that ranks would shard, on the meta device."""
    model: nn.Module
    model, _ = load_skeleton(plan, directory)
    if plan.method.quantization is not None:
        pack_layers(model, plan.method.quantization, packed_dtype(plan, resolve_dtypes(plan, stored_dtype(directory))))
    return attach_skeleton_adapters(model, plan, directory) if plan.method.trains_adapter else model
