"""PEFT adapters from the plan: their configuration, and the names under which PEFT stores them.

Also at which multiple of the learning rate each of their parameters learns.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune_job.api.method import ALL_LINEAR, LoraInit, MethodType
from finetune_job.method_settings import peft_fields
from finetune_job.methods import INSIDE_PEFT, METHODS, lora_kind
from finetune_job.module_names import ADAPTER
from finetune_job.plan.method_plan import LoraPlan, MethodPlan
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.adapters import FIRST_VALUES
from finetune_trainer.errors import ConfigError, InvariantError
from finetune_trainer.model.library_texts import NO_DEFAULT_TARGETS, STACKED_WEIGHTS
from finetune_trainer.model.packed_weights import is_to_be_packed

TASK = "CAUSAL_LM"
ORIGINAL = "original_module"
"""What PEFT calls the frozen module of which it trains a copy."""
WHOLE_COPY = "modules_to_save"
"""What PEFT calls that copy; no name that PEFT writes for one contains it."""
REFUSALS = (TypeError, ValueError, ImportError, RuntimeError)
"""What PEFT raises for settings that it does not take; ImportError where they need a package that is not there."""
_INITS = {LoraInit.ZERO_B: True, LoraInit.RANDOM: False}
"""What PEFT writes as a truth value. Where we start an adapter from the base's weights ourselves, PEFT is to leave them alone."""


def config_class(method: MethodType) -> type[PeftConfig]:
    """PEFT's configuration class of a method that has an adapter."""
    found: type[PeftConfig] = PEFT_TYPE_TO_CONFIG_MAPPING[METHODS[method].peft_type]
    return found


def lora_config(lora: LoraPlan) -> LoraConfig:
    """PEFT's settings. Nothing in them names a machine or a path."""
    targets: str | list[str] = ALL_LINEAR if lora.target_modules == (ALL_LINEAR,) else list(lora.target_modules)
    return LoraConfig(
        task_type=TASK,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        target_parameters=list(lora.target_parameters) or None,
        exclude_modules=list(lora.exclude_modules) or None,
        layers_to_transform=None if lora.layers_to_transform is None else list(lora.layers_to_transform),
        init_lora_weights=True if lora.starts_from_base else _INITS.get(lora.init_lora_weights, lora.init_lora_weights.value),
        modules_to_save=list(lora.modules_to_save) or None,
        trainable_token_indices=(
            {name: list(rows) for name, rows in lora.separate_token_rows.items()} or list(lora.trainable_token_indices) or None
        ),
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias=lora.bias.value,
    )


def adapter_config(method: MethodPlan) -> PeftConfig:
    """PEFT's settings of any method with an adapter. Raises ConfigError naming the setting."""
    try:
        if method.lora is not None:
            return lora_config(method.lora)
        if method.adapter is None:
            raise ConfigError(f"spec.method.type: {method.type.value} has no adapter")
        reason = METHODS[method.type].refused
        if reason:
            raise ConfigError(f"spec.method.type: {method.type.value} is not supported: {reason}", "start a job with another")
        values, wrong = peft_fields(method.type, method.adapter.settings)
        for problem in wrong:
            raise ConfigError(f"spec.method.settings.{problem.name}: {problem.value!r}: {problem.reason}", problem.fix)
        return config_class(method.type)(task_type=TASK, **values)
    except REFUSALS as error:
        field = METHODS[method.type].family.value
        raise ConfigError(f"spec.{field}: PEFT refuses these settings: {error}", "change them as it says") from error


def unfit_for_experts(method: MethodPlan) -> dict[str, str]:
    """Fields that PEFT's adapters of stacked weights do not work with, and what they have to be."""
    wanted = {}
    if METHODS[method.type].needs.magnitudes:
        wanted["spec.method.type"] = lora_kind(packs_base=METHODS[method.type].packs_base, magnitudes=False).value
    if method.lora is not None and method.lora.lora_dropout:
        wanted["spec.method.lora.loraDropout"] = "0"
    return wanted


def attach(model: PreTrainedModel, plan: RunPlan) -> PeftModel:
    """The model with fresh adapters, its base frozen. Call before sharding.

    Seeded by the plan alone, so every rank of every world size starts with the same values. Raises ConfigError.
    """
    config = adapter_config(plan.method)
    field = METHODS[plan.method.type].family.value
    torch.manual_seed(plan.training.seed)
    held = model.dtype
    try:
        with _magnitudes_left_open(model.dtype):
            adapted = get_peft_model(model, config, autocast_adapter_dtype=plan.method.autocast_adapter_dtype)
    except MemoryError:
        raise
    except Exception as error:  # a library meets a user's settings: it divides by them, compiles them and looks them up
        said = error if isinstance(error, ValueError | TypeError | RuntimeError) else f"{type(error).__name__}: {error}"
        if STACKED_WEIGHTS.search(str(error)):
            unfit = " and ".join(f"{name}: {value}" for name, value in unfit_for_experts(plan.method).items())
            raise ConfigError(
                f"spec.{field}.targetModules: here names stacked weights of experts, and PEFT refuses: {said}",
                f"{f'set {unfit}, or ' if unfit else ''}name only modules outside the experts",
            ) from error
        if NO_DEFAULT_TARGETS.search(str(error)):
            raise ConfigError(
                f"spec.{field}.targetModules: PEFT has no choice of its own for this kind of model ({model.config.model_type})",
                "name the modules to adapt, by the model's own names: for IA3 keys, values and the last layer of each MLP, "
                "the latter in feedforwardModules, too",
            ) from error
        raise ConfigError(
            f"spec.{field}: PEFT refuses these settings for this model: {said}",
            "check them, targetModules first, against the model's module names",
        ) from error
    if not isinstance(adapted, PeftModel):
        raise ConfigError(f"spec.{field}: PEFT made no adapter model")
    if plan.method.autocast_adapter_dtype and plan.method.trains_parts_of_the_base:
        _hold_in_float32(adapted)
    if plan.method.lora is not None and plan.method.lora.starts_from_base:
        _take_off_first_values(adapted, plan.method.lora, held)
    adapted.train()
    return adapted


@contextmanager
def _magnitudes_left_open(loaded: torch.dtype) -> Iterator[None]:
    """DoRA on 4-bit layers whose weights are still to come: zeros for the norms of their rows, which whoever packs them measures.

    loaded: element type of the weights before they are packed, in which PEFT measures them.
    """
    measure = DoraLinearLayer.update_layer

    def update_layer(self: DoraLinearLayer, *, base_layer: Any, lora_A: torch.Tensor, **others: Any) -> None:  # noqa: N803
        if not is_to_be_packed(base_layer):
            measure(self, base_layer=base_layer, lora_A=lora_A, **others)
            return
        kind = torch.promote_types(lora_A.dtype, loaded)
        self.weight = nn.Parameter(torch.zeros(base_layer.out_features, dtype=kind, device=lora_A.device))

    DoraLinearLayer.update_layer = update_layer
    try:
        yield
    finally:
        DoraLinearLayer.update_layer = measure


def lora_layers(adapted: PeftModel) -> dict[str, LoraLayer]:
    """The layers with an adapter of LoRA, by their names, sorted."""
    return {name: layer for name, layer in sorted(adapted.named_modules()) if isinstance(layer, LoraLayer)}


def _take_off_first_values(adapted: PeftModel, lora: LoraPlan, held: torch.dtype) -> None:
    """A frozen adapter next to each one, for the values that it starts with, scaled by the opposite sign.

    So `W x + s (B A - B0 A0) x` is computed, what PEFT computes as `(W - s B0 A0) x + s B A x`, and the base keeps its weights:
    nothing is rounded or packed again, no tied weight changes, and every attempt on any number of ranks computes with the same
    bytes. `held`: element type of the base, in which FSDP 1 has to find what is frozen. Raises ConfigError.
    """
    field, init = "spec.method.lora.initLoraWeights", lora.init_lora_weights.value
    for name, layer in lora_layers(adapted).items():
        base, shown = layer.get_base_layer(), name.removeprefix(INSIDE_PEFT)
        if ADAPTER not in layer.lora_A or not isinstance(base, nn.Linear | Conv1D):
            raise ConfigError(
                f"{field}: {init} decomposes the weights of linear layers, and {shown} is a {type(base).__name__}",
                f"leave {shown} out of the targets, or remove initLoraWeights",
            )
        rank, width = layer.r[ADAPTER], min(layer.in_features, layer.out_features)
        if rank > width:
            raise ConfigError(
                f"{field}: {init} starts rank {rank} from a weight of rank {width} at most: {shown}",
                f"set rankPattern: {{{shown.rpartition('.')[2]}: {width}}}, or a lower rank for all",
            )
        for factors in (layer.lora_A, layer.lora_B):
            factors[FIRST_VALUES] = copy.deepcopy(factors[ADAPTER]).to(held).requires_grad_(requires_grad=False)
        # PEFT drops nothing from what the base computes, and this is a part of it.
        layer.lora_dropout[FIRST_VALUES] = nn.Identity()
        layer.scaling[FIRST_VALUES] = -layer.scaling[ADAPTER]
        for facts in (layer.r, layer.lora_alpha, layer.use_rslora, layer.use_dora, layer.lora_bias):
            facts[FIRST_VALUES] = facts[ADAPTER]
        layer._active_adapter = [ADAPTER, FIRST_VALUES]  # noqa: SLF001 - set_adapter would train both, in modules_to_save, too


def has_first_values(model: PeftModel) -> bool:
    """Whether its adapters start with a part of the base's weights."""
    return any(FIRST_VALUES in layer.lora_A for layer in lora_layers(model).values())


def plain_lora(trained: torch.Tensor, first: torch.Tensor, name: str) -> torch.Tensor:
    """A factor, called `name` in the file, of the plain LoRA adapter that changes the base as `trained` does, which started with
    `first`: `B A - B0 A0` is `[B, -B0] [A; A0]`, of twice the rank (peft: LoraModel.subtract_mutated_init).
    """
    is_first_factor = "lora_A" in name.split(".")
    return torch.cat(
        [trained, first.to(trained.dtype) if is_first_factor else -first.to(trained.dtype)], 0 if is_first_factor else 1
    )


def saved_shapes(shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes in the adapter's file of what is trained in these shapes, by the names under which it is stored."""
    if not isinstance(model, PeftModel) or not has_first_values(model):
        return dict(shapes)
    return {name: _twice_the_rank(name, shape) for name, shape in shapes.items()}


def _twice_the_rank(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    parts = name.split(".")
    twice = (0,) if "lora_A" in parts else (1,) if "lora_B" in parts else ()
    return tuple(2 * size if dimension in twice else size for dimension, size in enumerate(shape))


def _hold_in_float32(adapted: PeftModel) -> None:
    """All that is trained: PEFT sees to its adapters alone, and leaves copies of whole modules and biases in the base's type.

    The frozen weight of a normalisation whose bias is trained, too: torch's kernel for the CPU takes both in one type only.
    """
    for module in adapted.modules():
        own = list(module.parameters(recurse=False))
        if any(parameter.requires_grad for parameter in own):
            for parameter in own:
                if parameter.requires_grad or parameter.ndim == 1:
                    parameter.data = parameter.data.float()


def stored_names(model: PeftModel) -> dict[str, str]:
    """Parameter name in the model -> tensor name in adapter_model.safetensors, as PEFT itself would write it.

    Raises InvariantError if PEFT would leave a trained parameter out.
    """
    trainable = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names: dict[str, str] = {}
    for stored, tensor in _stored(model):
        if id(tensor) in trainable:
            names.setdefault(trainable[id(tensor)], stored)
    if lost := sorted(set(trainable.values()) - set(names)):
        raise InvariantError(f"PEFT would not save what is trained, first: {lost[:3]}")
    return names


def second_names(model: PeftModel) -> dict[str, str]:
    """Further names under which PEFT writes a trained parameter, such as rows that a tied head shares -> its first name."""
    first: dict[int, str] = {}
    for stored, tensor in _stored(model):
        first.setdefault(id(tensor), stored)
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {
        stored: first[id(tensor)] for stored, tensor in _stored(model) if id(tensor) in trainable and first[id(tensor)] != stored
    }


def fixed_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """What PEFT stores that is not trained, such as random projections: values that follow from the settings alone."""
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {stored: tensor.detach() for stored, tensor in _stored(model) if id(tensor) not in trainable}


def _stored(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    # Parameters themselves, not views of them, so that identity tells which is which.
    state = model.state_dict(keep_vars=True)
    stored = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    # With trained biases PEFT also lists what is inside a module that is trained whole: the base's own, frozen, and a copy's bias
    # a second time, under a name of which no reader knows what to do with it. What an adapter started with is not its own.
    foreign = {ORIGINAL, WHOLE_COPY, FIRST_VALUES}
    yield from ((name, tensor) for name, tensor in stored.items() if not foreign & set(name.split(".")))


def adapter_settings(model: PeftModel, base_model: str, revision: str | None = None) -> dict[str, Any]:
    """Content of adapter_config.json; sets are sorted, so equal runs give equal bytes."""
    settings = model.peft_config[ADAPTER].to_dict()
    settings["base_model_name_or_path"] = base_model
    settings["revision"] = revision
    settings["inference_mode"] = True
    _match_feedforward(settings)
    if has_first_values(model):
        _double_ranks(settings)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def _double_ranks(settings: dict[str, Any]) -> None:
    """Of LoRA, with the same scaling: alpha / r, or alpha / sqrt(r)."""
    factor = math.sqrt(2) if settings["use_rslora"] else 2
    settings["r"] *= 2
    settings["lora_alpha"] *= factor
    settings["rank_pattern"] = {name: 2 * rank for name, rank in settings["rank_pattern"].items()}
    settings["alpha_pattern"] = {name: factor * alpha for name, alpha in settings["alpha_pattern"].items()}


def _match_feedforward(settings: dict[str, Any]) -> None:
    """IA3: names of feed-forward modules as the targets spell them, without those that are not targets.

    PEFT fills in its own for the model whatever the targets are, and refuses the list when it loads the adapter.
    """
    names, targets = settings.get("feedforward_modules"), settings.get("target_modules")
    if isinstance(names, set) and isinstance(targets, set) and not names <= targets:
        settings["feedforward_modules"] = {
            target
            for target in targets
            if any(target == name or target.endswith(f".{name}") or name.endswith(f".{target}") for name in names)
        }


def learning_rate_scale(name: str, method: MethodPlan) -> float:
    """Factor on the learning rate of the parameter called `name`: LoRA+'s ratio for `lora_B`, 1 for everything else.

    Hayou, Ghosh and Yu, 2024, LoRA+: efficient low rank adaptation of large models: B, which starts at zero, is to learn faster
    than A. Adapters on embeddings, where it is A that starts at zero, keep the run's rate.
    """
    ratio = None if method.lora is None else method.lora.lora_plus_ratio
    return ratio if ratio is not None and "lora_B" in name.split(".") else 1.0
