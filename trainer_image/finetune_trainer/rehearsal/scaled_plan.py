"""The job's plan -> the plan of its rehearsal, and what was changed. Only what a scaled-down model on two CPU ranks forces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from finetune_job.api.base import ClaimPath
from finetune_job.api.enumerations import Dtype
from finetune_job.api.training import Precision
from finetune_job.method_settings import TRAINED_ROWS_SETTING, known_settings
from finetune_job.plan.method_plan import AdapterPlan, LoraPlan, MethodPlan
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.small_models.layers import KeptLayers
from finetune_trainer.small_models.shrink import ConfigChange, SmallConfig, Tokens, trained_token_ids

STEPS = 3
RESUMED_AFTER = 1
"""Steps: what comes after is trained again from the checkpoint."""
RANKS = 2
MODEL_CLAIM, WORKSPACE_CLAIM, OUTPUT_CLAIM = "model", "workspace", "results"
UNSCALED_PARAMETERS, UNSCALED_LAYERS = 4_000_000, 6
"""A model of at most this size is tried as it is."""
LARGEST_RANK = 32
"""The least number of channels of an adapted layer of a scaled-down model."""
_MICRO_BATCH, _ACCUMULATION, _PROMPTS, _KEPT_CHECKPOINTS = 2, 2, 4, 10
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
"""Settings of methods that the widths of a layer bound."""


def scaled_plan(plan: RunPlan, shrunken: SmallConfig | None) -> tuple[RunPlan, list[ConfigChange]]:
    """`shrunken`: None if the model is tried as it is."""
    changes: list[ConfigChange] = []
    world_size = min(plan.parallelism.world_size, RANKS)
    accumulation = min(plan.training.gradient_accumulation_steps, _ACCUMULATION)
    micro = min(plan.training.micro_batch_size, _MICRO_BATCH)
    method = plan.method if shrunken is None else _small_method(plan.method, shrunken, changes)
    _note(changes, "parallelism: ranks", plan.parallelism.world_size, world_size)
    _note(changes, "training.globalBatchSize", plan.training.global_batch_size, world_size * accumulation * micro)
    # There is no device here that parameters could be offloaded from.
    _note(changes, "parallelism.fsdp.offloadParams", plan.parallelism.fsdp.offload_params, after=False)
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
                    # Its parameters are of another size, and on a claim that is not there.
                    "start_from": None,
                    "step_timeout_seconds": _STEP_TIMEOUT_SECONDS,
                }
            ),
            "parallelism": plan.parallelism.model_copy(
                update={
                    "nodes": 1,
                    "processes_per_node": world_size,
                    "fsdp": plan.parallelism.fsdp.model_copy(update={"offload_params": False}),
                }
            ),
            "checkpoint": plan.checkpoint.model_copy(update={"every_steps": 1, "every_seconds": None, "keep": _KEPT_CHECKPOINTS}),
            "evaluation": plan.evaluation.model_copy(update={"every_steps": every_steps, "early_stopping": None}),
            "merge": plan.merge.model_copy(
                update={
                    "num_prompts": min(plan.merge.num_prompts, _PROMPTS),
                    # The user's thresholds are about the trained model, not about a random one.
                    "max_kl_divergence": None,
                    "min_top1_agreement": None,
                }
            ),
            "workspace": ClaimPath(claim=WORKSPACE_CLAIM),
            "output": ClaimPath(claim=OUTPUT_CLAIM),
        }
    )
    return scaled, changes


def single_process_plan(plan: RunPlan) -> RunPlan:
    """The same global batches in one process."""
    training = plan.training
    steps = training.global_batch_size // training.micro_batch_size
    return plan.model_copy(
        update={
            "training": training.model_copy(update={"gradient_accumulation_steps": steps}),
            "parallelism": plan.parallelism.model_copy(update={"processes_per_node": 1}),
        }
    )


def float32_plan(plan: RunPlan) -> RunPlan:
    """The same run with every value, product and sum in float32."""
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


def draws_random_numbers(method: MethodPlan) -> bool:
    """Whether the method has dropout of its own."""
    return method_without_dropout(method) != method


def method_without_dropout(method: MethodPlan) -> MethodPlan:
    """The method without dropout."""
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
        "trainable_token_indices": _kept(lora.trainable_token_indices, tokens),
        "separate_token_rows": {name: _kept(rows, tokens) for name, rows in lora.separate_token_rows.items()},
        **{
            field: tuple(dict.fromkeys(_renumbered(name, layers) for name in getattr(lora, field)))
            for field in ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")
        },
    }
    for field, value in new.items():
        _note(changes, f"method.lora.{_camel(field)}", getattr(lora, field), value)
    return lora.model_copy(update=new)


def _kept(rows: Iterable[int], tokens: Tokens) -> tuple[int, ...]:
    return tuple(sorted({tokens.kept_token_of(row) for row in rows}))


def _small_adapter(method: MethodPlan, adapter: AdapterPlan, shrunken: SmallConfig, changes: list[ConfigChange]) -> AdapterPlan:
    layers = shrunken.layers
    settings = dict(adapter.settings)
    for name, value in adapter.settings.items():
        if name == "layersToTransform":
            numbers = _numbers(tuple(value) if isinstance(value, list) else (value,), layers)
            settings[name] = list(numbers or ())
        elif name == TRAINED_ROWS_SETTING:
            settings[name] = list(_kept(trained_token_ids(method), shrunken.tokens))
        elif isinstance(value, list) and all(isinstance(each, str) for each in value):
            settings[name] = list(dict.fromkeys(_renumbered(each, layers) for each in value))
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
    """A module's name, or a pattern of names, with numbers of layers as the scaled-down model has them."""
    if layers is None:
        return name

    def kept(match: re.Match[str]) -> str:
        number = layers.kept_layer_of(int(match[1]))
        return match[1] if number is None else str(number)

    return _LAYER_NUMBER.sub(kept, name)


def without_unmatched(method: MethodPlan, patterns: list[str], changes: list[ConfigChange]) -> MethodPlan:
    """Without the names and patterns that mean layers which the scaled-down model does not have."""
    lora = method.lora
    if lora is None:
        return method
    new: dict[str, Any] = {}
    for field in ("rank_pattern", "alpha_pattern"):
        new[field] = {name: value for name, value in getattr(lora, field).items() if name not in patterns}
    for field in ("target_modules", "target_parameters", "exclude_modules", "modules_to_save"):
        new[field] = tuple(name for name in getattr(lora, field) if name not in patterns)
    for field, value in new.items():
        _note(changes, f"method.lora.{_camel(field)}", getattr(lora, field), value)
    return method.model_copy(update={"lora": lora.model_copy(update=new)})


def scaled_tokens(tokens: Tokens, method: MethodPlan) -> list[int]:
    """The tokens of the scaled-down model that the job trains."""
    return list(_kept(trained_token_ids(method), tokens))


def _scaled(value: int, scale: float) -> int:
    return max(1, round(value * scale))


def _note(changes: list[ConfigChange], field: str, before: Any, after: Any) -> None:
    if before != after:
        changes.append(ConfigChange(field, before, after))


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
