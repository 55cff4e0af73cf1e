"""Checks the names in an adapter's settings against the loaded model (name_matching.py has the matching rules).

In architectures whose experts used to be linear layers, PEFT interprets the old names of the experts, and all-linear, as names of
stacked parameters (peft.utils.transformers_weight_conversion). What PEFT then adapts, leaves out and writes to
adapter_config.json is also checked.
"""

from __future__ import annotations

from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune_job.api.method import ALL_LINEAR
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.methods import INSIDE_PEFT
from finetune_job.module_names import ADAPTER
from finetune_job.plan.method_plan import LoraPlan
from finetune_trainer.model.adapters import REFUSALS, lora_config
from finetune_trainer.preflight.adapted_modules import name_in_base
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.module_names import (
    wrong_method_settings,
    wrong_module_names,
    wrong_parameters,
    wrong_token_indices,
)
from finetune_trainer.preflight.name_matching import LAYER, is_expression_for, pattern_matches, targets

ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
"""Module classes that PEFT's LoRA layers can replace (peft.tuners.lora.model, dispatchers)."""
_FIELD = "spec.method.lora"
_LINEAR = (nn.Linear, Conv1D)


def check_method_settings(seen: ModelInspection) -> list[Finding]:
    """Checks the settings of methods other than LoRA."""
    method = seen.plan.method
    return [] if method.adapter is None else wrong_method_settings(method.type, method.adapter, _modules(seen))


def check_module_names(seen: ModelInspection) -> list[Finding]:
    """Checks the names of modules to adapt, to exclude and to train whole, the layer numbers, and the patterns."""
    adaptable = [name for name, module in seen.base.named_modules() if isinstance(module, ADAPTABLE)]
    return wrong_module_names(seen.lora, adaptable, _modules(seen), _parameters(seen), taken_for_experts(seen.lora, seen.base))


def check_parameter_names(seen: ModelInspection) -> list[Finding]:
    """Checks the names of parameters to adapt."""
    return wrong_parameters(seen.lora, _parameters(seen))


def check_token_indices(seen: ModelInspection) -> list[Finding]:
    """Checks the rows of the embedding that are to be trained."""
    return [] if seen.loaded is None else wrong_token_indices(seen.lora, seen.loaded.vocabulary_size)


def _modules(seen: ModelInspection) -> list[str]:
    return [name for name, _ in seen.base.named_modules()]


def _parameters(seen: ModelInspection) -> dict[str, int]:
    """Returns the number of dimensions of each parameter by its name."""
    return {name: parameter.ndim for name, parameter in seen.base.named_parameters()}


def taken_for_experts(lora: LoraPlan, base: PreTrainedModel) -> frozenset[str]:
    """Returns the names in targetModules that PEFT interprets as names of stacked parameters.

    If PEFT refuses a name, all are returned; attaching the adapters then reports the refusal.
    """
    written = frozenset(lora.target_modules)
    try:
        config = lora_config(lora)
        convert_peft_config_for_transformers(config, model=base, conversions=None)
    except REFUSALS:
        return written
    added = set(config.target_parameters or ()) - set(lora.target_parameters)
    parameters = [name for name, _ in base.named_parameters()]
    if not all(any(targets(name, parameter) for parameter in parameters) for name in added):
        return frozenset()
    return written - set(config.target_modules or ()) - {ALL_LINEAR}


def check_layers_of_experts(seen: ModelInspection) -> list[Finding]:
    """Refuses a choice of layers if PEFT interprets target modules as stacked parameters, which it adapts in all layers."""
    lora, taken = seen.lora, taken_for_experts(seen.lora, seen.base)
    if lora.layers_to_transform is None or not taken:
        return []
    field = f"{_FIELD}.layersToTransform"
    first = min(taken)
    return [
        make_finding(
            "target-parameters-all-layers",
            field=field,
            value=str(list(lora.layers_to_transform)),
            message=f"PEFT takes {first} of targetModules for the stacked experts of this architecture, and adapts those of all "
            "layers, whatever layers are chosen",
            fix=f"remove {field}, or {', '.join(sorted(taken))} from targetModules",
            changes={field: None},
        )
    ]


def check_excluded_names(seen: ModelInspection) -> list[Finding]:
    """Warns of excluded names that exclude only linear layers, while all-linear adapts the experts that once had these names."""
    lora, base = seen.lora, seen.base
    named = tuple(name for name in lora.exclude_modules if "." not in name)
    if lora.target_modules != (ALL_LINEAR,) or not named:
        return []
    taken = sorted(taken_for_experts(lora.model_copy(update={"target_modules": named}), base))
    if not taken:
        return []
    head = base.get_output_embeddings()
    linear = {name.rpartition(".")[2] for name, layer in base.named_modules() if isinstance(layer, _LINEAR) and layer is not head}
    wanted = sorted(linear - {*lora.exclude_modules, *lora.modules_to_save})
    field = f"{_FIELD}.targetModules"
    return [
        make_finding(
            "experts-not-excluded",
            field=f"{_FIELD}.excludeModules",
            value=taken[0],
            message=f"{', '.join(taken)}: all-linear adapts the stacked experts of this architecture, which had such names, and "
            "PEFT excludes none of them; only linear layers of these names get no adapter",
            fix=f"instead of {ALL_LINEAR} set {field}: [{', '.join(wanted)}]",
            changes={field: wanted},
        )
    ]


def check_saved_names(seen: ModelInspection) -> list[Finding]:
    """Refuses modules to train whole that contain parameters to adapt: PEFT would nest its wrappers, or raise its own error."""
    lora, base = seen.lora, seen.base
    try:
        config = lora_config(lora)
        convert_peft_config_for_transformers(config, model=base, conversions=None)
    except REFUSALS:
        return []  # attaching the adapters reports this
    adapted = [
        name for name, _ in base.named_parameters() if any(targets(target, name) for target in config.target_parameters or ())
    ]
    modules = [name for name, _ in base.named_modules() if name]
    both = {
        name: inside
        for name in lora.modules_to_save
        for module in modules
        if module.endswith(name)
        and (inside := next((parameter for parameter in adapted if parameter.startswith(f"{module}.")), None))
    }
    if not both:
        return []
    name, parameter = next(iter(both.items()))
    field = f"{_FIELD}.modulesToSave"
    left = [other for other in lora.modules_to_save if other not in both]
    by = (
        f"{_FIELD}.targetParameters"
        if any(targets(target, parameter) for target in lora.target_parameters)
        else f"{_FIELD}.targetModules"
    )
    return [
        make_finding(
            "experts-adapted-and-saved",
            field=field,
            value=name,
            message=f"{name!r} is to be trained whole, and {parameter} in it is adapted by {by}, which covers stacked experts of "
            "this architecture or their routers: PEFT does not do both",
            fix=f"remove {name} from {field}, or name only other modules in {by}, such as those of the attention",
            changes={field: left or None},
        )
    ]


def check_left_out(seen: ModelInspection) -> list[Finding]:
    """Reports linear layers that are named as targets but get no adapter."""
    model, lora = seen.trained.model, seen.lora
    if not isinstance(model, PeftModel):
        return []
    unadapted = _left_out(model, lora)
    if not unadapted:
        return []
    endings = sorted({name.rpartition(".")[2] for name in unadapted})
    weights = [f"{ending}.weight" for ending in endings]
    taken = (
        f"{', '.join(endings)}: PEFT takes these names for the stacked experts of this architecture, so {len(unadapted)} linear "
        f"layers with such names get no adapter, such as {unadapted[0]}"
    )
    field = f"{_FIELD}.targetParameters"
    wanted = list(dict.fromkeys([*lora.target_parameters, *weights]))
    if lora.target_modules == (ALL_LINEAR,):
        return [
            make_finding(
                "linear-layers-without-adapter",
                field=f"{_FIELD}.targetModules",
                value=ALL_LINEAR,
                message=taken,
                fix=f"to adapt these, also set {field}: [{', '.join(wanted)}] besides {_FIELD}.targetModules: [{ALL_LINEAR}]",
            )
        ]
    return [
        make_finding(
            "target-module-not-adapted",
            field=f"{_FIELD}.targetModules",
            value=endings[0],
            message=taken,
            fix=f"name their weights: set {field}: [{', '.join(wanted)}]",
            changes={field: wanted},
        )
    ]


def _left_out(model: PeftModel, lora: LoraPlan) -> list[str]:
    wrapped = [name for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    inside = tuple(f"{name}." for name in wrapped)
    head = model.get_output_embeddings()
    plain = [
        name.removeprefix(INSIDE_PEFT)
        for name, layer in model.named_modules()
        if isinstance(layer, _LINEAR) and layer is not head and not name.startswith(inside)
    ]
    # In a model of text and images, an expression excludes everything outside the text part (model/adapters.py).
    beside_text = model.peft_config[ADAPTER].exclude_modules
    if isinstance(beside_text, str):
        plain = [name for name in plain if not is_expression_for(beside_text, [name])]
    return [name for name in plain if _is_meant(name, lora)]


def _is_meant(module: str, lora: LoraPlan) -> bool:
    if any(targets(name, module) for name in lora.exclude_modules):
        return False
    if lora.layers_to_transform is not None:
        number = LAYER.match(module)
        if number is None or int(number.group(1)) not in lora.layers_to_transform:
            return False
    return any(name == ALL_LINEAR or targets(name, module) for name in lora.target_modules)


def check_ranks_in_file(seen: ModelInspection) -> list[Finding]:
    """Reports a rank or alpha that differs between training and adapter_config.json, because patterns are sorted there."""
    model = seen.trained.model
    if not isinstance(model, PeftModel):
        return []
    config = model.peft_config[ADAPTER]
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or ADAPTER not in layer.r:
            continue
        key = name_in_base(name)
        if isinstance(layer, ParamWrapper):
            key = f"{key}.{layer.parameter_name}"
        for field, patterns, number in (
            ("rankPattern", config.rank_pattern, layer.r[ADAPTER]),
            ("alphaPattern", config.alpha_pattern, layer.lora_alpha[ADAPTER]),
        ):
            first = next((pattern for pattern in sorted(patterns) if pattern_matches(pattern, [key])), None)
            if first is None or patterns[first] == number:
                continue
            path = f"{_FIELD}.{field}"
            return [
                make_finding(
                    "adapter-pattern-on-experts",
                    field=path,
                    value=str(number),
                    message=f"training gives {key} {number}, but PEFT adds the pattern {first}: {patterns[first]} for the "
                    "layers that it fuses, and adapter_config.json lists that first: a program that loads the adapter uses it",
                    fix=f"let no key of {path} match {key}",
                    changes={path: {name: value for name, value in patterns.items() if not pattern_matches(name, [key])} or None},
                )
            ]
    return []
