"""What PEFT attached without a word and what would then fail in the first forward pass, or train nothing."""

from __future__ import annotations

from collections.abc import Iterator

from peft import PeftModel
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from finetune_job.api.method import MethodType
from finetune_job.catalogue.book import make_finding
from finetune_job.methods import METHODS
from finetune_job.plan.run_plan import MethodPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.preflight.model_inspection import ModelInspection


def check_attached(seen: ModelInspection) -> list[Finding]:
    """Findings about the model with its adapters; none for full fine-tuning."""
    return attached_findings(seen.trained.model, seen.plan.method)


def attached_findings(model: nn.Module, method: MethodPlan) -> list[Finding]:
    """The same of any model and method."""
    if not isinstance(model, PeftModel):
        return []
    field = f"spec.{METHODS[method.type].family.value}"
    return [
        *_without_values(model, field),
        *_wrapped_inside(model, field),
        *_packed_and_saved(model, field),
        *_rows_of_a_saved_module(model, field),
        *_saved_by_their_end(model, field),
        *_not_fed_forward(model, method, field),
        *_rows_beyond(model, method, field),
        *_rows_twice(model, field),
    ]


def _without_values(model: PeftModel, field: str) -> Iterator[Finding]:
    """Sizes that divide to nothing, such as a block of one channel that is to be turned."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trained and not any(parameter.numel() for parameter in trained.values()):
        reason = f"all {len(trained)} trained tensors have no values, first {next(iter(trained))}: nothing would be learnt"
        yield make_finding(
            "adapter-without-values", field=field, value="0 values", message=reason, fix="choose larger ranks or blocks"
        )


def _wrapped_inside(model: PeftModel, field: str) -> Iterator[Finding]:
    """PEFT looks for modulesToSave among the modules of the adapters, too, by the end of the name."""
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            inside = [part for part, module in layer.named_modules() if part and isinstance(module, ModulesToSaveWrapper)]
            for part in inside[:1]:
                reason = f"modulesToSave also names {part} inside the adapter of {name}, which then fails in its first forward pass"
                fix = "write the end of the full module name, as in model.norm instead of norm"
                yield make_finding(
                    "saved-module-inside-adapter", field=f"{field}.modulesToSave", value=part, message=reason, fix=fix
                )
                return


def _packed_and_saved(model: PeftModel, field: str) -> Iterator[Finding]:
    """PEFT copies a packed layer as it is and marks the bytes as trained; no gradient ever reaches them."""
    packed = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, ModulesToSaveWrapper) and any(is_packed(part) for part in layer.modules_to_save.modules())
    ]
    if packed:
        shown = packed[0].removeprefix("base_model.model.")
        reason = f"{shown} is packed to 4 bits, and so would be the copy that is to be trained: it would get no gradient"
        fix = f"name {shown.rpartition('.')[2]} in targetModules instead, or set method.type: LoRA"
        yield make_finding("saved-module-packed", field=f"{field}.modulesToSave", value=shown, message=reason, fix=fix)


def is_packed(module: nn.Module) -> bool:
    """Whether bitsandbytes holds its weight."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return isinstance(module, Linear4bit | Linear8bitLt)


def _rows_of_a_saved_module(model: PeftModel, field: str) -> Iterator[Finding]:
    for name, layer in model.named_modules():
        if isinstance(layer, TrainableTokensLayer) and isinstance(layer.get_base_layer(), ModulesToSaveWrapper):
            reason = f"{name} is saved whole by modulesToSave, and trainableTokenIndices trains rows of it or of what is tied to it"
            fix = "remove trainableTokenIndices, or that module from modulesToSave"
            yield make_finding("trainable-tokens-overlap", field=f"{field}.modulesToSave", value=name, message=reason, fix=fix)
            return
        if getattr(layer, "lora_magnitude_vector", None) and isinstance(layer.base_layer, AuxiliaryTrainingWrapper):
            reason = f"{name} is adapted by DoRA, and its weight is the embedding's, of which trainableTokenIndices trains rows"
            fix = "remove trainableTokenIndices, or that module from targetModules"
            yield make_finding("trainable-tokens-overlap", field=f"{field}.targetModules", value=name, message=reason, fix=fix)
            return


def _saved_by_their_end(model: PeftModel, field: str) -> Iterator[Finding]:
    """`norm` is the end of `input_layernorm`."""
    for name in getattr(model.peft_config["default"], "modules_to_save", None) or ():
        saved = [path for path, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper) and path.endswith(name)]
        meant = [path for path in saved if path.endswith(f".{name}")]
        others = [path for path in saved if path not in meant]
        if others and (meant or len(others) > 1):
            last = sorted({path.rsplit(".", 1)[-1] for path in others})
            reason = f"{name!r} is the end of {', '.join(last)}, too: PEFT trains and saves {len(saved)} modules"
            fix = f"write a longer end, as in model.{name}" if meant else "write the whole last part of the name"
            yield make_finding("saved-module-by-its-end", field=f"{field}.modulesToSave", value=name, message=reason, fix=fix)


def _not_fed_forward(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """IA3 only. PEFT compares the lists when it loads the adapter, and where targets were left to it not before."""
    if method.type is not MethodType.IA3 or method.adapter is None:
        return
    written, targets = method.adapter.settings.get("feedforwardModules"), model.peft_config["default"].target_modules
    if isinstance(written, list) and isinstance(targets, set | list) and (wrong := sorted(set(written) - set(targets))):
        reason = f"{wrong[0]} is not adapted: targetModules is {', '.join(sorted(targets))}; PEFT would not load the adapter"
        yield make_finding(
            "feedforward-module-not-adapted",
            field=f"{field}.feedforwardModules",
            value=wrong[0],
            message=reason,
            fix="name adapted modules only",
        )


def _rows_beyond(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """TrainableTokens only, which takes rows of whatever it names; those of embeddings beside LoRA, module_names.py checks."""
    if method.type is not MethodType.TRAINABLE_TOKENS:
        return
    for name, layer in model.named_modules():
        if isinstance(layer, TrainableTokensLayer):
            rows = layer.get_base_layer().weight.shape[0]
            if beyond := sorted(index for index in layer.token_indices["default"] if index >= rows):
                shown = name.removeprefix("base_model.model.")
                reason = f"{shown} has {rows} rows, and there is no row {beyond[0]} among them ({len(beyond)} such ids)"
                fix = f"write ids from 0 to {rows - 1}, or name embeddings alone in targetModules"
                yield make_finding(
                    "token-index-unknown", field=f"{field}.tokenIndices", value=str(beyond[0]), message=reason, fix=fix
                )
                return


def _rows_twice(model: PeftModel, field: str) -> Iterator[Finding]:
    """PEFT gives a tied head the rows of its embedding, and wraps them once more where the head is named, too."""
    for name, layer in model.named_modules():
        if isinstance(layer, TrainableTokensLayer) and isinstance(layer.base_layer, TrainableTokensLayer):
            shown = name.removeprefix("base_model.model.")
            reason = f"{shown} shares the embedding's weight; named beside it, it is wrapped twice, and its first pass fails"
            fix = f"remove {shown.rpartition('.')[2]} from targetModules: its rows follow those of the embedding"
            yield make_finding("trainable-tokens-overlap", field=f"{field}.targetModules", value=shown, message=reason, fix=fix)
            return
