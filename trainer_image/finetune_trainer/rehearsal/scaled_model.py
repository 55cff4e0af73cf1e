"""Build what a rehearsal uses: a scaled-down model of the same architecture with random weights, data, and a plan.

This runs in a child of run.py. All files of a rehearsal are in one temporary directory (see RehearsalPaths).
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune_job.api.inputs import LossOn
from finetune_job.layout import WorkspaceLayout
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, VALIDATION, SplitArrays
from finetune_trainer.model.load import load_config, stored_dtype
from finetune_trainer.preflight.model_checks import inspect_structure
from finetune_trainer.rehearsal.scaled_plan import (
    MODEL_CLAIM,
    OUTPUT_CLAIM,
    STEPS,
    UNSCALED_LAYERS,
    UNSCALED_PARAMETERS,
    WORKSPACE_CLAIM,
    kept_tokens,
    method_without_dropout,
    scaled_plan,
    without_unmatched,
)
from finetune_trainer.small_models.layers import layer_count
from finetune_trainer.small_models.search import NoSmallModelError, find_small_model, special_tokens
from finetune_trainer.small_models.shrink import ConfigChange, Tokens, trained_token_ids, without_dropout
from finetune_trainer.weights.headers import read_checkpoint

log = logging.getLogger(__name__)
SHORTEST, LONGEST = 6, 16
"""Minimum and maximum number of tokens in a document."""
DOCUMENTS_PER_SEQUENCE = 3
HELD_OUT = 4
_NAMED_PER_DOCUMENT = 2
_UNMATCHED = frozenset({"target-module-unknown", "saved-module-unknown", "adapter-pattern-unmatched", "layer-number-unknown"})


class ScaledModel(BaseModel):
    """Facts about the scaled-down model that the other children need."""

    plan: RunPlan
    changes: tuple[str, ...]
    """Differences between the job and its rehearsal."""
    parameters: int
    draws_random_numbers: bool
    """Whether the model or the method has dropout; if so, runs without dropout are compared with one process."""


def make_scaled_model(plan: RunPlan, directory: Path, paths: RehearsalPaths) -> ScaledModel:
    """Write model and data to their paths. Raises NoSmallModelError, and TrainerError for a model that is rejected."""
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
    # Data must not contain placeholder tokens, such as image tokens.
    special = special_tokens(described)
    splits = tiny_splits(scaled, tokens.size, special, kept_tokens(trained_token_ids(plan.method), tokens))
    pad = text.get("pad_token_id")
    facts = {"pad_token_id": tokens.kept_token_of(pad) if type(pad) is int and pad >= 0 else 0, "splits": sorted(splits)}
    write_prepared(paths.prepared, splits, facts)
    quiet = without_dropout(described)
    if quiet != described:
        _write_quiet(config, quiet, paths)
    changes = [*(shrunken.changes if shrunken is not None else ()), *changes]
    return ScaledModel(
        plan=scaled,
        changes=tuple(change.text() for change in changes),
        parameters=parameters,
        draws_random_numbers=quiet != described or method_without_dropout(plan.method) != plan.method,
    )


def _write(model: PreTrainedModel, directory: Path, target: Path, dtype: torch.dtype) -> None:
    model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(target)
    for code in directory.glob("*.py"):
        shutil.copyfile(code, target / code.name)


def _name_whole(config: PreTrainedConfig, described: dict[str, Any], model: PreTrainedModel, target: Path) -> None:
    """Save the whole model's configuration with a text part whose class transformers finds only by that (mllama)."""
    if type(model.config) in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - there is no public name
        return
    made = type(config).from_dict(described)
    made.architectures = [type(model).__name__]
    made.dtype = model.dtype
    made.save_pretrained(target)


def _write_quiet(config: PreTrainedConfig, quiet: dict[str, Any], paths: RehearsalPaths) -> None:
    """Write a model with the same weights but with the configuration `quiet`, which has no dropout."""
    paths.quiet_model.mkdir()
    for path in paths.model.iterdir():
        if path.name != "config.json":
            (paths.quiet_model / path.name).symlink_to(path.resolve())
    made = type(config).from_dict(quiet)
    made.architectures = config.architectures
    made.save_pretrained(paths.quiet_model)


def _accepted(scaled: RunPlan, model: Path, changes: list[ConfigChange]) -> RunPlan:
    """Return a plan that preflight accepts, without the names of layers that `model` lacks. Raises NoSmallModelError."""
    findings = inspect_structure(scaled, model).findings
    unmatched = [finding.value for finding in findings if finding.rule in _UNMATCHED]
    if unmatched:
        scaled = scaled.model_copy(update={"method": without_unmatched(scaled.method, unmatched, changes)})
        findings = inspect_structure(scaled, model).findings
    for finding in findings:
        if finding.severity == "error":
            raise NoSmallModelError(f"the settings fit the model but not the scaled-down one: {finding.field}: {finding.message}")
    return scaled


@dataclass(frozen=True)
class RehearsalPaths:
    """Paths of a rehearsal.

    root/
        model/, quiet-model/   the scaled-down model, and the same weights without dropout
        prepared/              its data
        <run>/                 the claims of a run, with links to the model and the data above
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
        """Return the context of a run; the first call creates its claims. Runs of one plan differ only in their paths."""
        root = self.root / name
        if not root.exists():
            workspace = root / WORKSPACE_CLAIM
            workspace.mkdir(parents=True)
            (root / OUTPUT_CLAIM).mkdir()
            model = self.quiet_model if quiet and self.quiet_model.exists() else self.model
            (root / MODEL_CLAIM).symlink_to(model.absolute(), target_is_directory=True)
            WorkspaceLayout(workspace).prepared.symlink_to(self.prepared.absolute(), target_is_directory=True)
        # The scaled-down model may consist of links to the job's own files. Preflight has checked where those lead.
        return RunContext(plan, plan_sha256(plan), root, attempt=0, links_lead_to=Path("/"))


def tiny_splits(plan: RunPlan, vocabulary: int, avoided: Collection[int], named: Collection[int]) -> dict[str, SplitArrays]:
    """Make random data. `vocabulary`: rows of the embedding; `avoided`: tokens that are not text; `named`: tokens that the job
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
    # A document's first token is never supervised, because the token before it belongs to another document.
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
