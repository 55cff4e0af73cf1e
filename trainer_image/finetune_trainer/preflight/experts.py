"""Checks mixtures of experts: whether the experts are packed and adapted, and whether routers are adapted unintentionally.

Most models keep their experts as stacked parameters. These are not linear layers, although all-linear and QLoRA seem to cover
them. attached.py calls these checks with the adapted model and adds their findings to its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedConfig

from finetune_job.api.method import ALL_LINEAR
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.method_settings import TARGETS
from finetune_job.methods import METHODS
from finetune_job.module_names import is_router
from finetune_job.plan.method_plan import LoraPlan, MethodPlan
from finetune_memory.packed_experts import Packing
from finetune_memory.packed_experts import experts_not_packed as experts_not_packed_of
from finetune_trainer.preflight.adapted_modules import adapted_modules, adapter_settings, is_packed, name_in_base
from finetune_trainer.preflight.module_names import STACKED_DIMENSIONS
from finetune_trainer.weights.rounding import dtype_name


def experts_not_packed(model: PeftModel, method: MethodPlan) -> Iterator[Finding]:
    """Reports experts that would not be packed (docs/explanation/decisions/0018-experts-are-not-packed.md)."""
    stacked = _stacked_experts(model)
    if method.quantization is None or not stacked:
        return
    packed = {name: layer.in_features * layer.out_features for name, layer in model.named_modules() if is_packed(layer)}
    others = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and not (name.endswith(".weight") and name.rpartition(".")[0] in packed)
    }
    total = sum(packed.values()) + sum(others.values())
    experts = {name: parameter.numel() for name, parameter in stacked.items()}
    dtype = dtype_name(next(iter(stacked.values())).dtype)
    finding = experts_not_packed_of(method, Packing(total, sum(packed.values()), experts), dtype)
    if finding is not None:
        yield finding


def experts_without_adapter(model: nn.Module, lora: LoraPlan) -> Finding | None:
    """Warns of experts that get no adapter from all-linear because they are stacked parameters, not linear layers."""
    if lora.target_modules != (ALL_LINEAR,) or lora.target_parameters:
        return None
    # In architectures that PEFT knows, it also adapts the experts if the target is all-linear.
    adapted = {
        id(getattr(layer.get_base_layer(), layer.parameter_name)) for layer in model.modules() if isinstance(layer, ParamWrapper)
    }
    stacked = {name: parameter for name, parameter in _stacked_experts(model).items() if id(parameter) not in adapted}
    total = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    in_experts = sum(parameter.numel() for parameter in stacked.values())
    if not in_experts:
        return None
    names = sorted({".".join(name.split(".")[-3:]) for name in stacked})
    return make_finding(
        "experts-without-adapter",
        field="spec.method.lora.targetModules",
        value=ALL_LINEAR,
        message=f"the experts are {len(stacked)} stacked parameters and no linear layers, so all-linear gives them no adapter: "
        f"{100 * in_experts / total:.0f} % of the model's weights, such as {next(iter(stacked))}",
        fix=f"to adapt these, also set spec.method.lora.targetParameters: [{', '.join(names[:4])}] besides "
        f"spec.method.lora.targetModules: [{ALL_LINEAR}]",
    )


def adapted_routers(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """Reports routers that all-linear adapts, because they are linear layers, or because PEFT treats them as such."""
    named = method.lora.target_modules if method.lora is not None else adapter_settings(method).get(TARGETS)
    if named is None and METHODS[method.type].targets_all_linear:
        named = ALL_LINEAR
    adapted, counts = adapted_modules(model), _expert_counts(getattr(model, "config", None))
    routers = {name for name, layer in adapted.items() if is_router(name) and _outputs(layer) in counts}
    if named not in (ALL_LINEAR, [ALL_LINEAR], (ALL_LINEAR,)) or not routers:
        return
    others = {name: isinstance(layer, ParamWrapper) for name, layer in adapted.items() if name not in routers}
    modules = sorted({name.rpartition(".")[2] for name, is_parameter in others.items() if not is_parameter})
    parameters = sorted({".".join(name.split(".")[-3:]) for name, is_parameter in others.items() if is_parameter})
    yield make_finding(
        "router-adapted",
        field=f"{field}.{TARGETS}",
        value=ALL_LINEAR,
        message=f"{ALL_LINEAR} also adapts {len(routers)} routers, such as {min(routers)}: which expert a token goes to changes, "
        "and no loss keeps the experts evenly used",
        fix=f"to leave them as they are, set {field}.{TARGETS}: [{', '.join(modules)}]"
        + (f" and {field}.targetParameters: [{', '.join(parameters)}]" if parameters else ""),
    )


def _outputs(layer: BaseTunerLayer) -> int | None:
    """Returns the number of outputs of the adapted matrix. The number is not read from packed matrices: their shape differs."""
    base = layer.get_base_layer()
    weight = getattr(base, layer.parameter_name if isinstance(layer, ParamWrapper) else "weight", None)
    outputs: int | None = getattr(base, "out_features", None if weight is None else weight.shape[0])
    return outputs


def _stacked_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the frozen parameters that hold one matrix per expert, by their names in the base."""
    # Other parameters, such as convolution kernels, also have three dimensions.
    counts = _expert_counts(getattr(model, "config", None))
    return {
        name_in_base(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == STACKED_DIMENSIONS
        and not parameter.requires_grad
        and ("expert" in name or parameter.shape[0] in counts)
    }


def _expert_counts(config: object) -> set[int]:
    """Returns the numbers of experts in a configuration, including the parts of composite models."""
    if not isinstance(config, PreTrainedConfig):
        return set()
    counts = {value for name, value in vars(config).items() if "expert" in name and isinstance(value, int)}
    return counts.union(*(_expert_counts(part) for part in vars(config).values())) - {0, 1}
