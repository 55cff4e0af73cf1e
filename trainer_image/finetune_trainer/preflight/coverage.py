"""What an adapter reaches of a model, and what it does not although its settings read as if it did. Warnings only.

Called by meta_model.py with the adapted model on the meta device.
"""

from __future__ import annotations

from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedConfig

from finetune_job.api.method import ALL_LINEAR
from finetune_job.catalogue.book import make_finding
from finetune_job.plan.run_plan import LoraPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.module_names import STACKED_DIMENSIONS


def check_coverage(seen: ModelInspection) -> list[Finding]:
    """Experts that get no adapter, and ranks above what a module can use."""
    found = [_experts_left_out(seen.trained.model, seen.lora), _rank_beyond_width(seen.trained.model)]
    return [finding for finding in found if finding is not None]


def _experts_left_out(model: nn.Module, lora: LoraPlan) -> Finding | None:
    """Linear layers are meant by all-linear, and a model keeps most of them as stacked parameters, which are none."""
    if lora.target_modules != (ALL_LINEAR,) or lora.target_parameters:
        return None
    # For architectures that it knows, PEFT itself adapts them where it is asked for all linear layers.
    adapted = {
        id(getattr(layer.get_base_layer(), layer.parameter_name)) for layer in model.modules() if isinstance(layer, ParamWrapper)
    }
    # Kernels of convolutions, for one, have three dimensions, too.
    counts = _expert_counts(getattr(model, "config", None))
    stacked = {
        name.removeprefix("base_model.model."): parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == STACKED_DIMENSIONS
        and not parameter.requires_grad
        and id(parameter) not in adapted
        and ("expert" in name or parameter.shape[0] in counts)
    }
    total = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    held = sum(parameter.numel() for parameter in stacked.values())
    if not held:
        return None
    names = sorted({".".join(name.split(".")[-3:]) for name in stacked})
    return make_finding(
        "experts-without-adapter",
        field="spec.method.lora.targetModules",
        value=ALL_LINEAR,
        message=f"the experts are {len(stacked)} stacked parameters and no linear layers, so all-linear gives them no adapter: "
        f"{100 * held / total:.0f} % of the model's weights, first {next(iter(stacked))}",
        fix=f"to adapt them, too, set spec.method.lora.targetParameters: [{', '.join(names[:4])}] beside "
        f"spec.method.lora.targetModules: [{ALL_LINEAR}]",
    )


def _expert_counts(config: object) -> set[int]:
    """Numbers that a configuration gives its experts, parts of composite models included."""
    if not isinstance(config, PreTrainedConfig):
        return set()
    found = {value for name, value in vars(config).items() if "expert" in name and isinstance(value, int)}
    return found.union(*(_expert_counts(part) for part in vars(config).values())) - {0, 1}


def _rank_beyond_width(model: nn.Module) -> Finding | None:
    """A product of two matrices has at most the rank of the layer's smaller side."""
    wide = {
        name.rpartition(".lora_A.")[0]: (parameter.shape[0], min(layer.in_features, layer.out_features))
        for name, parameter in model.named_parameters()
        if ".lora_A." in name
        and isinstance(layer := _base_of(model, name.rpartition(".lora_A.")[0]), nn.Linear)
        and parameter.ndim == len(("rank", "inputs"))
        and parameter.shape[0] > min(layer.in_features, layer.out_features)
    }
    if not wide:
        return None
    first, (rank, width) = next(iter(wide.items()))
    ending = first.rpartition(".")[2]
    return make_finding(
        "rank-beyond-width",
        field="spec.method.lora.r",
        value=str(rank),
        message=f"{len(wide)} modules are narrower than their adapter's rank, first {first.removeprefix('base_model.model.')} with "
        f"{width} channels: what exceeds them costs memory and adds nothing",
        fix=f"set spec.method.lora.rankPattern: {{{ending}: {width}}}, or a lower rank for all",
    )


def _base_of(model: nn.Module, name: str) -> nn.Module | None:
    layer = model.get_submodule(name)
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else None
