"""Make the plan of a rehearsal from the job's, changing only what a small model on two CPUs requires, and list the changes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic.alias_generators import to_camel

from finetune_job.api.base import ClaimPath
from finetune_job.api.enumerations import Dtype
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.api.training import Precision
from finetune_job.method_settings import TRAINED_ROWS_SETTING, known_settings
from finetune_job.plan.method_plan import AdapterPlan, LoraPlan, MethodPlan
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.small_models.layers import KeptLayers
from finetune_trainer.small_models.shrink import ConfigChange, SmallConfig, Tokens, trained_token_ids

STEPS = 3
RESUMED_AFTER = 1
"""The step of the checkpoint from which the run is resumed; later steps are trained again."""
RANKS = 2
MODEL_CLAIM, WORKSPACE_CLAIM, OUTPUT_CLAIM = "model", "workspace", "results"
UNSCALED_PARAMETERS, UNSCALED_LAYERS = 4_000_000, 6
"""A model with at most this many parameters and layers is tried unchanged."""
LARGEST_RANK = 32
"""Largest rank of an adapter: no adapted layer of a scaled-down model has fewer channels."""
_MICRO_BATCH, _ACCUMULATION, _PROMPTS, _KEPT_CHECKPOINTS = 2, 2, 4, 10
_LEAST_AGREEMENT = 0.8
"""Minimum share of positions at which the merged and the unmerged model must find the same token most likely.

There are about 48 positions. If rounding alone changes 3 % of the tokens, which verification accepts for a trained model, 10 of
48 differ in less than one of 100,000 rehearsals. A wrong merge is wrong at nearly all positions.
"""
_STEP_TIMEOUT_SECONDS = 60
_LAYER_NUMBER = re.compile(r"(?<![\w\[{(-])(\d+)(?=\\?\.|$)")
LARGEST_SETTINGS = {
    "r": LARGEST_RANK,
    "blockSize": 32,
    "oftBlockSize": 32,
    "groupSize": 32,
    "vectorLength": 32,
    "nFrequency": 500,
    "numVectors": 64,
    "thetaDLength": 512,
}
"""Maximum values of the method settings that a layer's width limits."""


def scaled_plan(plan: RunPlan, shrunken: SmallConfig | None) -> tuple[RunPlan, list[ConfigChange]]:
    """Return the plan of a rehearsal. `shrunken`: None if the model is tried unchanged."""
    changes: list[ConfigChange] = []
    world_size = min(plan.parallelism.world_size, RANKS)
    accumulation = min(plan.training.gradient_accumulation_steps, _ACCUMULATION)
    micro = min(plan.training.micro_batch_size, _MICRO_BATCH)
    method = plan.method if shrunken is None else _small_method(plan.method, shrunken, changes)
    _note(changes, "parallelism: ranks", plan.parallelism.world_size, world_size)
    _note(changes, "training.globalBatchSize", plan.training.global_batch_size, world_size * accumulation * micro)
    # The rehearsal runs on CPUs, so there is no device from which parameters could be offloaded.
    fsdp = plan.parallelism.fsdp.model_copy(update={"offload_params": False})
    _note(changes, "parallelism.fsdp.offloadParams", plan.parallelism.fsdp.offload_params, after=False)
    if shrunken is not None and fsdp.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        # No minimum size selects the same modules in both models, so each layer becomes a unit.
        by_layer = {"auto_wrap_policy": AutoWrapPolicy.TRANSFORMER_BASED_WRAP, "transformer_layer_cls_to_wrap": None}
        fsdp = fsdp.model_copy(update=by_layer | {"min_num_params": None})
        _note(
            changes, "parallelism.fsdp.autoWrapPolicy", plan.parallelism.fsdp.auto_wrap_policy.value, fsdp.auto_wrap_policy.value
        )
    _note(changes, "training.compile", plan.training.compile, after=False)
    _note(changes, "training: steps", plan.training.max_steps or f"{plan.training.epochs} epochs", STEPS)
    _note(changes, "checkpoint.everySteps", plan.checkpoint.every_steps, 1)
    if plan.evaluation.early_stopping is not None:
        _note(changes, "evaluation.earlyStopping", "set", "none")
    every_steps = None if plan.evaluation.every_steps is None else 2
    scaled = plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"location": ClaimPath(claim=MODEL_CLAIM), "added_tokens": ()}),
            "fetch": None,
            "publish": None,
            "placement": None,
            "method": method,
            "training": plan.training.model_copy(
                update={
                    "epochs": None,
                    "max_steps": STEPS,
                    "global_batch_size": world_size * accumulation * micro,
                    "micro_batch_size": micro,
                    "gradient_accumulation_steps": accumulation,
                    "compile": False,
                    "trackers": (),
                    # The small model cannot load that checkpoint: its parameters differ in size, and its claim is not mounted.
                    "start_from": None,
                    "step_timeout_seconds": _STEP_TIMEOUT_SECONDS,
                }
            ),
            "parallelism": plan.parallelism.model_copy(update={"nodes": 1, "processes_per_node": world_size, "fsdp": fsdp}),
            "checkpoint": plan.checkpoint.model_copy(update={"every_steps": 1, "every_seconds": None, "keep": _KEPT_CHECKPOINTS}),
            "evaluation": plan.evaluation.model_copy(update={"every_steps": every_steps, "early_stopping": None}),
            "merge": plan.merge.model_copy(
                update={
                    "num_prompts": min(plan.merge.num_prompts, _PROMPTS),
                    # The user's thresholds are for the trained model, not for a random one.
                    "max_kl_divergence": None,
                    "min_top1_agreement": _LEAST_AGREEMENT,
                }
            ),
            "workspace": ClaimPath(claim=WORKSPACE_CLAIM),
            "output": ClaimPath(claim=OUTPUT_CLAIM),
        }
    )
    return scaled, changes


def single_process_plan(plan: RunPlan) -> RunPlan:
    """Return a plan for the same global batches in one process."""
    training = plan.training
    steps = training.global_batch_size // training.micro_batch_size
    return plan.model_copy(
        update={
            "training": training.model_copy(update={"gradient_accumulation_steps": steps}),
            "parallelism": plan.parallelism.model_copy(update={"processes_per_node": 1}),
        }
    )


def float32_plan(plan: RunPlan) -> RunPlan:
    """Return a plan for the same run in which every value, product and sum is in float32."""
    method = plan.method
    if method.quantization is not None:
        packed = method.quantization.model_copy(update={"compute_dtype": Dtype.FLOAT32, "quant_storage": None})
        method = method.model_copy(update={"quantization": packed})
    changed = plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"dtype": Dtype.FLOAT32}),
            "method": method,
            "training": plan.training.model_copy(update={"precision": Precision.FP32}),
        }
    )
    return changed.with_fsdp(param_dtype=None, reduce_dtype=Dtype.FLOAT32)


def method_without_dropout(method: MethodPlan) -> MethodPlan:
    """Return the method without dropout."""
    if method.lora is not None:
        return method.model_copy(update={"lora": method.lora.model_copy(update={"lora_dropout": 0.0})})
    if method.adapter is None:
        return method
    settings = {name: value for name, value in method.adapter.settings.items() if "dropout" not in name.lower()}
    return method.model_copy(update={"adapter": method.adapter.model_copy(update={"settings": settings})})


def _small_method(method: MethodPlan, shrunken: SmallConfig, changes: list[ConfigChange]) -> MethodPlan:
    if method.lora is not None:
        return method.model_copy(update={"lora": _small_lora(method.lora, shrunken, changes)})
    if method.adapter is not None:
        return method.model_copy(update={"adapter": _small_adapter(method, method.adapter, shrunken, changes)})
    return method


def _small_lora(lora: LoraPlan, shrunken: SmallConfig, changes: list[ConfigChange]) -> LoraPlan:
    layers, tokens = shrunken.layers, shrunken.tokens
    largest = max([lora.r, *lora.rank_pattern.values()])
    scale = min(1.0, LARGEST_RANK / largest)
    new: dict[str, Any] = {
        "r": _scaled(lora.r, scale),
        "lora_alpha": _scaled(lora.lora_alpha, scale),
        "rank_pattern": {_renumbered(name, layers): _scaled(value, scale) for name, value in lora.rank_pattern.items()},
        "alpha_pattern": {_renumbered(name, layers): _scaled(value, scale) for name, value in lora.alpha_pattern.items()},
        "layers_to_transform": _numbers(lora.layers_to_transform, layers),
        "trainable_token_indices": kept_tokens(lora.trainable_token_indices, tokens),
        "separate_token_rows": {name: kept_tokens(rows, tokens) for name, rows in lora.separate_token_rows.items()},
        **{
            field: tuple(dict.fromkeys(_renumbered(name, layers) for name in getattr(lora, field)))
            for field in ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")
        },
    }
    for field, value in new.items():
        _note(changes, f"method.lora.{to_camel(field)}", getattr(lora, field), value)
    return lora.model_copy(update=new)


def kept_tokens(rows: Iterable[int], tokens: Tokens) -> tuple[int, ...]:
    """Return the token ids of the scaled-down model that replace these ids."""
    return tuple(sorted({tokens.kept_token_of(row) for row in rows}))


def _small_adapter(method: MethodPlan, adapter: AdapterPlan, shrunken: SmallConfig, changes: list[ConfigChange]) -> AdapterPlan:
    layers = shrunken.layers
    settings = dict(adapter.settings)
    for name, value in adapter.settings.items():
        if name == "layersToTransform":
            numbers = _numbers(tuple(value) if isinstance(value, list) else (value,), layers)
            settings[name] = list(numbers or ())
        elif name == TRAINED_ROWS_SETTING:
            settings[name] = list(kept_tokens(trained_token_ids(method), shrunken.tokens))
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            settings[name] = list(dict.fromkeys(_renumbered(item, layers) for item in value))
        elif name.endswith("Pattern") and isinstance(value, dict):
            settings[name] = {
                _renumbered(pattern, layers): min(number, LARGEST_RANK) if name == "rankPattern" else number
                for pattern, number in value.items()
            }
    known = known_settings(method.type)
    for name, largest in LARGEST_SETTINGS.items():
        value = settings.get(name, known[name].default) if name in known else None
        if type(value) is int and value > largest:
            settings[name] = largest
    for name, value in settings.items():
        _note(
            changes, f"method.settings.{name}", adapter.settings.get(name, known[name].default if name in known else None), value
        )
    return adapter.model_copy(update={"settings": settings})


def _numbers(numbers: tuple[int, ...] | None, layers: KeptLayers | None) -> tuple[int, ...] | None:
    if numbers is None or layers is None:
        return numbers
    return tuple(sorted({kept for number in numbers if (kept := layers.kept_layer_of(number)) is not None}))


def _renumbered(name: str, layers: KeptLayers | None) -> str:
    """Replace the layer numbers in a module's name, or in a pattern of names, by those of the scaled-down model."""
    if layers is None:
        return name

    def kept(match: re.Match[str]) -> str:
        number = layers.kept_layer_of(int(match[1]))
        return match[1] if number is None else str(number)

    return _LAYER_NUMBER.sub(kept, name)


def without_unmatched(method: MethodPlan, patterns: list[str], changes: list[ConfigChange]) -> MethodPlan:
    """Remove the names and patterns of layers that the scaled-down model does not have."""
    lora = method.lora
    if lora is None:
        return method
    new: dict[str, Any] = {}
    for field in ("rank_pattern", "alpha_pattern"):
        new[field] = {name: value for name, value in getattr(lora, field).items() if name not in patterns}
    for field in ("target_modules", "target_parameters", "exclude_modules", "modules_to_save"):
        new[field] = tuple(name for name in getattr(lora, field) if name not in patterns)
    for field, value in new.items():
        _note(changes, f"method.lora.{to_camel(field)}", getattr(lora, field), value)
    return method.model_copy(update={"lora": lora.model_copy(update=new)})


def _scaled(value: int, scale: float) -> int:
    return max(1, round(value * scale))


def _note(changes: list[ConfigChange], field: str, before: Any, after: Any) -> None:
    if before != after:
        changes.append(ConfigChange(field, before, after))
