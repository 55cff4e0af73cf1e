"""PEFT adapters from the plan: their configuration, the names under which PEFT stores them, and their learning rates."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterator, Mapping
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
"""PEFT's name for the frozen original of a module that is trained as a copy."""
WHOLE_COPY = "modules_to_save"
"""PEFT's name for such a trained copy; no other name that PEFT writes contains it."""
REFUSALS = (TypeError, ValueError, ImportError, RuntimeError)
"""Exceptions that PEFT raises for settings that it rejects; ImportError if they need a package that is not installed."""
_INITS = {LoraInit.ZERO_B: True, LoraInit.RANDOM: False}
"""Initialisations that PEFT expects as a bool; it takes others by name. Adapters that start from the base's weights get True."""


def config_class(method: MethodType) -> type[PeftConfig]:
    """PEFT's configuration class for a method that has an adapter."""
    kind: type[PeftConfig] = PEFT_TYPE_TO_CONFIG_MAPPING[METHODS[method].peft_type]
    return kind


def lora_config(lora: LoraPlan) -> LoraConfig:
    """PEFT's settings for LoRA. They contain no path and nothing about the machine."""
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
    """PEFT's settings for any method with an adapter. Raises ConfigError, which names the setting."""
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
    """Return the fields whose values PEFT's adapters for stacked weights do not support -> the value that each must have."""
    wanted = {}
    if METHODS[method.type].needs.magnitudes:
        wanted["spec.method.type"] = lora_kind(packs_base=METHODS[method.type].packs_base, magnitudes=False).value
    if method.lora is not None and method.lora.lora_dropout:
        wanted["spec.method.lora.loraDropout"] = "0"
    return wanted


def attach(model: PreTrainedModel, plan: RunPlan) -> PeftModel:
    """Add new adapters to the model and freeze its base. Call this before sharding.

    The seed depends only on the plan, so every rank starts with the same values, whatever the world size. Raises ConfigError.
    """
    config = adapter_config(plan.method)
    targets = getattr(config, "target_modules", None)
    if targets and getattr(config, "exclude_modules", targets) is None:
        config.exclude_modules = _beside_text(model, [targets] if isinstance(targets, str) else targets)
    field = METHODS[plan.method.type].family.value
    torch.manual_seed(plan.training.seed)
    base_dtype = model.dtype
    try:
        with _magnitudes_left_open(model.dtype):
            adapted = get_peft_model(model, config, autocast_adapter_dtype=plan.method.autocast_adapter_dtype)
    except MemoryError:
        raise
    except Exception as error:  # PEFT computes with the user's settings, so any exception may occur
        reason = error if isinstance(error, ValueError | TypeError | RuntimeError) else f"{type(error).__name__}: {error}"
        if STACKED_WEIGHTS.search(str(error)):
            unfit = " and ".join(f"{name}: {value}" for name, value in unfit_for_experts(plan.method).items())
            raise ConfigError(
                f"spec.{field}.targetModules: the targets include stacked weights of experts, and PEFT refuses: {reason}",
                f"{f'set {unfit}, or ' if unfit else ''}name only modules outside the experts",
            ) from error
        if NO_DEFAULT_TARGETS.search(str(error)):
            raise ConfigError(
                f"spec.{field}.targetModules: PEFT has no default targets for this kind of model ({model.config.model_type})",
                "name the modules to adapt, by the model's own names: for IA3 keys, values and the last layer of each MLP, "
                "the latter also in feedforwardModules",
            ) from error
        raise ConfigError(
            f"spec.{field}: PEFT refuses these settings for this model: {reason}",
            "check them, targetModules first, against the model's module names",
        ) from error
    if not isinstance(adapted, PeftModel):
        raise ConfigError(f"spec.{field}: PEFT made no adapter model")
    if plan.method.autocast_adapter_dtype and plan.method.trains_parts_of_the_base:
        _hold_in_float32(adapted)
    if plan.method.lora is not None and plan.method.lora.starts_from_base:
        _take_off_first_values(adapted, plan.method.lora, base_dtype)
    adapted.train()
    return adapted


def _beside_text(model: PreTrainedModel, targets: Collection[str]) -> str | None:
    """Return a regular expression for modules of an image or audio model that match a target's name but are outside the text
    part, where text does not reach them. None if there are no such modules.
    """
    text = getattr(model.config, "text_config", None)
    decoder = None if text is None else model.get_decoder()
    names = {module: name for name, module in model.named_modules()}
    inside = names.get(decoder)
    if decoder is None or not inside or type(decoder.config) is not type(text):
        return None
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)]
    of_text = [f".{name}" for name in layers if name.startswith(f"{inside}.")]
    # Sorted, because PEFT turns the targets into a set, and the expression is saved.
    named = [name for name in sorted(targets) if any(layer.endswith(f".{name}") for layer in of_text)]
    shared = ".*" if ALL_LINEAR in targets else "|".join(map(re.escape, named))
    head = re.escape(names.get(model.get_output_embeddings(), inside))
    beside = rf"(?!{re.escape(inside)}\.|{head}$)(.*\.)?({shared})"
    return beside if shared and any(re.fullmatch(beside, name) for name in layers) else None


@contextmanager
def _magnitudes_left_open(loaded: torch.dtype) -> Iterator[None]:
    """Let DoRA's magnitudes start at zero for 4-bit layers that are not loaded yet; norms are measured during packing.

    loaded: element type of the weights before packing, in which PEFT measures norms.
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
    """Return the layers with a LoRA adapter, sorted by name."""
    return {name: layer for name, layer in sorted(adapted.named_modules()) if isinstance(layer, LoraLayer)}


def _take_off_first_values(adapted: PeftModel, lora: LoraPlan, base_dtype: torch.dtype) -> None:
    """Add to each adapter a frozen copy of its first values, which is subtracted because its scaling has the opposite sign.

    The model then computes `W x + s (B A - B0 A0) x`, where PEFT would compute `(W - s B0 A0) x + s B A x`, and the base keeps
    its weights: nothing is rounded or packed again, no tied weight changes, and every attempt on any number of ranks computes
    with the same bytes. `base_dtype`: element type of the base; FSDP 1 requires everything frozen to have it. Raises ConfigError.
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
            factors[FIRST_VALUES] = copy.deepcopy(factors[ADAPTER]).to(base_dtype).requires_grad_(requires_grad=False)
        # The first values act as part of the base, to which PEFT applies no dropout.
        layer.lora_dropout[FIRST_VALUES] = nn.Identity()
        layer.scaling[FIRST_VALUES] = -layer.scaling[ADAPTER]
        for facts in (layer.r, layer.lora_alpha, layer.use_rslora, layer.use_dora, layer.lora_bias):
            facts[FIRST_VALUES] = facts[ADAPTER]
        layer._active_adapter = [ADAPTER, FIRST_VALUES]  # noqa: SLF001 - set_adapter would train both, also in modules_to_save


def has_first_values(model: PeftModel) -> bool:
    """Whether the model's adapters start from a part of the base's weights."""
    return any(FIRST_VALUES in layer.lora_A for layer in lora_layers(model).values())


def plain_lora(trained: torch.Tensor, first: torch.Tensor, name: str) -> torch.Tensor:
    """Join a trained factor and its first values into the factor of an equivalent plain LoRA adapter with twice the rank, since
    `B A - B0 A0` is `[B, -B0] [A; A0]` (peft: LoraModel.subtract_mutated_init). `name`: the factor's name in the file.
    """
    is_first_factor = "lora_A" in name.split(".")
    return torch.cat(
        [trained, first.to(trained.dtype) if is_first_factor else -first.to(trained.dtype)], 0 if is_first_factor else 1
    )


def saved_shapes(shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Convert shapes of trained tensors, by stored name, to their shapes in the adapter's file."""
    if not isinstance(model, PeftModel) or not has_first_values(model):
        return dict(shapes)
    return {name: _twice_the_rank(name, shape) for name, shape in shapes.items()}


def _twice_the_rank(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    parts = name.split(".")
    twice = (0,) if "lora_A" in parts else (1,) if "lora_B" in parts else ()
    return tuple(2 * size if dimension in twice else size for dimension, size in enumerate(shape))


def _hold_in_float32(adapted: PeftModel) -> None:
    """Convert all trained parameters to float32. PEFT converts only adapters, not biases or copies of whole modules.

    The frozen weight of a normalisation whose bias is trained is also converted: torch's CPU kernel needs one type for both.
    """
    for module in adapted.modules():
        own = list(module.parameters(recurse=False))
        if any(parameter.requires_grad for parameter in own):
            for parameter in own:
                if parameter.requires_grad or parameter.ndim == 1:
                    parameter.data = parameter.data.float()


def stored_names(model: PeftModel) -> dict[str, str]:
    """Map each parameter name in the model to the tensor name in adapter_model.safetensors, as PEFT would write it.

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
    """Map each further name under which PEFT writes a trained parameter (such as rows shared with a tied head) to the first."""
    first: dict[int, str] = {}
    for stored, tensor in _stored(model):
        first.setdefault(id(tensor), stored)
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {
        stored: first[id(tensor)] for stored, tensor in _stored(model) if id(tensor) in trainable and first[id(tensor)] != stored
    }


def fixed_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return tensors that PEFT stores but does not train, such as random projections, which depend only on the settings."""
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {stored: tensor.detach() for stored, tensor in _stored(model) if id(tensor) not in trainable}


def _stored(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    # `keep_vars` returns the parameters themselves, not views, so that they can be compared by identity.
    state = model.state_dict(keep_vars=True)
    stored = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    # With trained biases, PEFT also lists the contents of a module that is trained as a copy: the base's frozen tensors, and the
    # copy's bias again under a name that no reader understands. These and first values are left out.
    foreign = {ORIGINAL, WHOLE_COPY, FIRST_VALUES}
    yield from ((name, tensor) for name, tensor in stored.items() if not foreign & set(name.split(".")))


def adapter_settings(model: PeftModel, base_model: str, revision: str | None = None) -> dict[str, Any]:
    """Return the content of adapter_config.json; sets are sorted, so that equal runs give equal bytes."""
    settings = model.peft_config[ADAPTER].to_dict()
    settings["base_model_name_or_path"] = base_model
    settings["revision"] = revision
    settings["inference_mode"] = True
    _match_feedforward(settings)
    if has_first_values(model):
        _double_ranks(settings)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def _double_ranks(settings: dict[str, Any]) -> None:
    """Double LoRA's ranks, and change alpha so that the scaling stays the same: alpha / r, or alpha / sqrt(r)."""
    factor = math.sqrt(2) if settings["use_rslora"] else 2
    settings["r"] *= 2
    settings["lora_alpha"] *= factor
    settings["rank_pattern"] = {name: 2 * rank for name, rank in settings["rank_pattern"].items()}
    settings["alpha_pattern"] = {name: factor * alpha for name, alpha in settings["alpha_pattern"].items()}


def _match_feedforward(settings: dict[str, Any]) -> None:
    """Give IA3's feed-forward modules the names that the targets have, and leave out those that are not targets.

    Whatever the targets are, PEFT fills in its own list for the model, and then rejects this list when it loads the adapter.
    """
    names, targets = settings.get("feedforward_modules"), settings.get("target_modules")
    if isinstance(names, set) and isinstance(targets, set) and not names <= targets:
        settings["feedforward_modules"] = {
            target
            for target in targets
            if any(target == name or target.endswith(f".{name}") or name.endswith(f".{target}") for name in names)
        }


def learning_rate_scale(name: str, method: MethodPlan) -> float:
    """Return the factor by which a parameter's learning rate is multiplied: LoRA+'s ratio for `lora_B`, 1 for everything else.

    Hayou, Ghosh and Yu, 2024, LoRA+: efficient low rank adaptation of large models: B, which starts at zero, must learn faster
    than A. Adapters of embeddings, whose A starts at zero, keep the run's rate.
    """
    ratio = None if method.lora is None else method.lora.lora_plus_ratio
    return ratio if ratio is not None and "lora_B" in name.split(".") else 1.0
