"""Checks what PEFT attaches without an error: adapters that fail in the first pass, train nothing, or cover less than intended.

Takes the model with its adapters as meta tensors; returns findings to model_checks.py. experts.py checks mixtures of experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from peft import PeftModel
from peft.tuners.oft.layer import OFTLayer
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from finetune_job.api.method import MethodType
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.method_settings import PATTERNS, TARGETS
from finetune_job.methods import INSIDE_PEFT, METHODS
from finetune_job.module_names import ADAPTER
from finetune_job.plan.method_plan import MethodPlan
from finetune_trainer.model.load import stated_config, ties_head
from finetune_trainer.preflight.adapted_modules import adapted_modules, adapter_settings, is_packed, name_in_base
from finetune_trainer.preflight.experts import adapted_routers, experts_not_packed, experts_without_adapter
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.name_matching import pattern_matches, targets

_MOST_DIVISORS = 16
"""Maximum number of divisors that a fix lists."""


def check_attached(seen: ModelInspection) -> list[Finding]:
    """Returns the findings about the model with its adapters; none for full fine-tuning."""
    model, method = seen.trained.model, seen.plan.method
    if not isinstance(model, PeftModel):
        return []
    field = f"spec.{METHODS[method.type].family.value}"
    return [
        *_without_values(model, field),
        *_wrapped_inside(model, field),
        *(_packed_and_saved(model, field) if method.quantization is not None else ()),
        *experts_not_packed(model, method),
        *_rows_of_a_saved_module(model, method, field),
        *_saved_by_their_end(model, field),
        *_not_fed_forward(model, method, field),
        *_blocks_of_another_size(model, method, field),
        *_rows_beyond(model, method, field),
        *_rows_twice(model, method, field),
        *_rows_without_bias(model, method, field),
        *_patterns_of_others(model, method, field),
        *adapted_routers(model, method, field),
    ]


def _without_values(model: PeftModel, field: str) -> Iterator[Finding]:
    """Reports settings with which all trained tensors are empty, such as blocks of one channel, which cannot be rotated."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trained and not any(parameter.numel() for parameter in trained.values()):
        reason = f"all {len(trained)} trained tensors, such as {next(iter(trained))}, are empty: the job would learn nothing"
        yield make_finding(
            "adapter-without-values", field=field, value="0 values", message=reason, fix="choose larger ranks or blocks"
        )


def _wrapped_inside(model: PeftModel, field: str) -> Iterator[Finding]:
    """Reports names in modulesToSave that also match a module inside an adapter: PEFT compares only the ends of names."""
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            inside = [part for part, module in layer.named_modules() if part and isinstance(module, ModulesToSaveWrapper)]
            for part in inside[:1]:
                reason = f"modulesToSave also names {part} inside {name}, so it is trained whole in addition to its adapter"
                fix = "write the end of the full module name, as in model.norm instead of norm"
                yield make_finding(
                    "saved-module-inside-adapter", field=f"{field}.modulesToSave", value=part, message=reason, fix=fix
                )
                return


def _packed_and_saved(model: PeftModel, field: str) -> Iterator[Finding]:
    """Reports packed layers that are to be trained whole: PEFT marks a copy of the bytes as trained, but it gets no gradient."""
    packed = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, ModulesToSaveWrapper) and any(is_packed(part) for part in layer.modules_to_save.modules())
    ]
    if packed:
        shown = packed[0].removeprefix(INSIDE_PEFT)
        reason = f"{shown} is packed to 4 bits, and so is the copy that would be trained: no gradient reaches it"
        fix = f"name {shown.rpartition('.')[2]} in targetModules instead, or set method.type: LoRA"
        yield make_finding("saved-module-packed", field=f"{field}.modulesToSave", value=shown, message=reason, fix=fix)


def _rows_of_a_saved_module(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    # LoRA also trains its adapters, so rows can be left out. TrainableTokens trains nothing else, so no change is proposed.
    changes = None if method.lora is None else {f"{field}.trainableTokenIndices": None}
    for name, layer in model.named_modules():
        if isinstance(layer, TrainableTokensLayer) and isinstance(layer.get_base_layer(), ModulesToSaveWrapper):
            setting = "modulesToSave"
            reason = (
                f"{name} is saved whole by modulesToSave, and trainableTokenIndices trains rows of it or of what is tied to it"
            )
        elif getattr(layer, "lora_magnitude_vector", None) and isinstance(layer.base_layer, AuxiliaryTrainingWrapper):
            setting = "targetModules"
            reason = f"{name} is adapted by DoRA, and its weight is the embedding's, of which trainableTokenIndices trains rows"
        else:
            continue
        yield make_finding(
            "trainable-tokens-overlap",
            field=f"{field}.{setting}",
            value=name,
            message=reason,
            fix=f"remove trainableTokenIndices, or that module from {setting}",
            changes=changes,
        )
        return


def _saved_by_their_end(model: PeftModel, field: str) -> Iterator[Finding]:
    """Reports a name of modulesToSave that also matches other modules, as `norm` matches the end of `input_layernorm`."""
    for name in getattr(model.peft_config[ADAPTER], "modules_to_save", None) or ():
        saved = [
            path for path, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper) and path.endswith(name)
        ]
        meant = [path for path in saved if path.endswith(f".{name}")]
        others = [path for path in saved if path not in meant]
        if others and (meant or len(others) > 1):
            last = sorted({path.rsplit(".", 1)[-1] for path in others})
            reason = f"{name!r} is also the end of {', '.join(last)}: PEFT trains and saves {len(saved)} modules"
            fix = f"write a longer end, as in model.{name}" if meant else "write the whole last part of the name"
            yield make_finding("saved-module-by-its-end", field=f"{field}.modulesToSave", value=name, message=reason, fix=fix)


def _not_fed_forward(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """Checks IA3's feedforwardModules. If PEFT chooses the targets, it compares the lists only when it loads the adapter."""
    if method.type is not MethodType.IA3 or method.adapter is None:
        return
    written, targets = method.adapter.settings.get("feedforwardModules"), model.peft_config[ADAPTER].target_modules
    if isinstance(written, list) and isinstance(targets, set | list) and (wrong := sorted(set(written) - set(targets))):
        reason = f"{wrong[0]} is not adapted: targetModules is {', '.join(sorted(targets))}; PEFT would not load the adapter"
        yield make_finding(
            "feedforward-module-not-adapted",
            field=f"{field}.feedforwardModules",
            value=wrong[0],
            message=reason,
            fix="name adapted modules only",
            changes={f"{field}.feedforwardModules": [name for name in written if name not in wrong]},
        )


def _blocks_of_another_size(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """Checks OFT only: PEFT replaces a number that does not divide a layer's width; with other methods, PEFT refuses it."""
    if method.type is not MethodType.OFT or method.adapter is None:
        return
    config = model.peft_config[ADAPTER]
    setting, asked = ("oftBlockSize", config.oft_block_size) if config.r == 0 else ("r", config.r)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, OFTLayer)}
    taken = {name: (layer.oft_block_size if config.r == 0 else layer.r)[ADAPTER] for name, layer in layers.items()}
    others = [name for name, number in taken.items() if number != asked]
    if not others:
        return
    common = math.gcd(*(layer.in_features for layer in layers.values()))
    # A block of one channel cannot be rotated, so only sizes above 1 are proposed.
    fitting = [
        number for number in range(1, common + 1) if common % number == 0 and (number if config.r == 0 else common // number) > 1
    ]
    listed = ", ".join(map(str, fitting[:_MOST_DIVISORS])) + (", ..." if len(fitting) > _MOST_DIVISORS else "")
    nearest = min(fitting, key=lambda number: abs(number - asked), default=None)
    shown = others[0].removeprefix(INSIDE_PEFT)
    yield make_finding(
        "adapter-blocks-of-another-size",
        field=f"{field}.{setting}",
        value=f"{asked}" + ("" if setting in method.adapter.settings else " (the default)"),
        message=f"{asked} does not divide the {layers[others[0]].in_features} channels of {shown}, and PEFT takes "
        f"{taken[others[0]]} instead, as for {len(others)} of {len(layers)} adapted layers",
        fix=f"write a number that divides the channels of all adapted layers: one of {listed}"
        if fitting
        else f"name only layers in {TARGETS} whose channels it divides: no number divides those of all adapted layers",
        changes=None if nearest is None else {f"{field}.{setting}": nearest},
    )


def _rows_beyond(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """Checks TrainableTokens only, which accepts rows of any module. module_names.py checks the rows that LoRA trains."""
    if method.type is not MethodType.TRAINABLE_TOKENS:
        return
    for name, layer in model.named_modules():
        if isinstance(layer, TrainableTokensLayer):
            rows = layer.get_base_layer().weight.shape[0]
            if beyond := sorted(index for index in layer.token_indices[ADAPTER] if index >= rows):
                shown = name.removeprefix(INSIDE_PEFT)
                reason = f"{shown} has {rows} rows, and there is no row {beyond[0]} among them ({len(beyond)} such ids)"
                fix = f"write ids from 0 to {rows - 1}, or name embeddings alone in targetModules"
                written = [index for index in adapter_settings(method).get("tokenIndices") or () if index < rows]
                yield make_finding(
                    "token-index-unknown",
                    field=f"{field}.tokenIndices",
                    value=str(beyond[0]),
                    message=reason,
                    fix=fix,
                    # If no id is left, only the user knows which rows were meant.
                    changes={f"{field}.tokenIndices": written} if written else None,
                )
                return


def _rows_twice(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """Reports a tied head among the targets: PEFT gives the head the embedding's rows anyway, and would wrap it twice."""
    for name, layer in model.named_modules():
        if isinstance(layer, TrainableTokensLayer) and isinstance(layer.base_layer, TrainableTokensLayer):
            shown = name.removeprefix(INSIDE_PEFT)
            reason = f"{shown} shares the embedding's weight; if it is also named, it is wrapped twice, and its first pass fails"
            fix = f"remove {shown.rpartition('.')[2]} from targetModules: its rows follow those of the embedding"
            named = adapter_settings(method).get(TARGETS)
            left = [target for target in named if not targets(target, shown)] if isinstance(named, list) else []
            yield make_finding(
                "trainable-tokens-overlap",
                field=f"{field}.targetModules",
                value=shown,
                message=reason,
                fix=fix,
                changes={f"{field}.{TARGETS}": left} if left else None,
            )
            return


def _rows_without_bias(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """Reports layers (including tied heads) with trained rows and a bias: PEFT computes these without the bias."""
    for name, layer in model.named_modules():
        if isinstance(layer, TrainableTokensLayer) and getattr(layer.get_base_layer(), "bias", None) is not None:
            shown = name_in_base(name).removesuffix(".token_adapter")
            setting = "tokenIndices" if method.lora is None else "trainableTokenIndices"
            reason = (
                f"PEFT leaves out the bias of {shown} while it trains rows of it, or of what is tied to it, and the merged model "
                "has that bias: the rows would be learnt for another model"
            )
            fix = f"remove {setting}" if method.lora is not None else "set method.type: LoRA"
            yield make_finding(
                "model-settings-conflict",
                field=f"{field}.{setting}",
                value=shown,
                message=reason,
                fix=f"{fix}, and name the embeddings in modulesToSave, which trains all of their rows",
                changes=None if method.lora is None else {f"{field}.{setting}": None},
            )
            return


def _patterns_of_others(model: PeftModel, method: MethodPlan, field: str) -> Iterator[Finding]:
    """Reports pattern keys that match only modules without an adapter. module_names.py reports keys that match nothing."""
    settings = adapter_settings(method)
    if method.lora is not None:
        settings = {"rankPattern": method.lora.rank_pattern, "alphaPattern": method.lora.alpha_pattern}
    adapted = adapted_modules(model)
    present = {name_in_base(name) for name, _ in model.named_modules()}
    for setting in PATTERNS:
        patterns = settings.get(setting) or {}
        others = [key for key in patterns if pattern_matches(key, present) and not pattern_matches(key, adapted)]
        if others:
            endings = sorted({name.rpartition(".")[2] for name in adapted})
            yield make_finding(
                "adapter-pattern-unmatched",
                field=f"{field}.{setting}",
                value=others[0],
                message=f"{others[0]!r} matches no module that is adapted, so it would change nothing",
                fix=f"remove it, or also adapt such modules; the adapted ones are {', '.join(endings[:24])}",
                changes={f"{field}.{setting}": {key: patterns[key] for key in patterns if key not in others} or None},
            )


def check_rows_of_two_heads(seen: ModelInspection) -> list[Finding]:
    """Refuses trained rows if the base's config.json ties the output head to the embeddings, but its files hold a different head.

    transformers and the trainer (model/load.py) load the head from the files. A program that loads an adapter reads only
    config.json.
    """
    if not any(isinstance(module, TrainableTokensLayer) for module in seen.trained.model.modules()):
        return []
    if ties_head(seen.base.config) or not ties_head(stated_config(seen.plan, seen.directory)):
        return []
    method = seen.plan.method
    setting = "trainableTokenIndices" if method.lora is not None else "tokenIndices"
    return [
        make_finding(
            "token-rows-with-two-heads",
            field=f"spec.{METHODS[method.type].family.value}.{setting}",
            value="tie_word_embeddings: true",
            message="config.json says that the output head shares the values of the embeddings, and the files hold others: "
            "transformers loads these, and PEFT takes the trained rows for rows of the head as well when it loads the adapter",
            fix=f"set tie_word_embeddings: false in config.json of the base, or remove {setting}",
        )
    ]


def check_coverage(seen: ModelInspection) -> list[Finding]:
    """Reports experts that get no adapter, and ranks that are higher than a module can use."""
    findings = [experts_without_adapter(seen.trained.model, seen.lora), _rank_beyond_width(seen.trained.model)]
    return [finding for finding in findings if finding is not None]


def _rank_beyond_width(model: nn.Module) -> Finding | None:
    """Reports a rank above a layer's smaller dimension, which is the highest rank that a change of its weight can have."""
    wide: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():
        module, part, _ = name.rpartition(".lora_A.")
        layer = model.get_submodule(module) if part else None
        base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else None
        if isinstance(base, nn.Linear) and parameter.ndim == len(("rank", "inputs")):
            rank, width = parameter.shape[0], min(base.in_features, base.out_features)
            if rank > width:
                wide[module] = (rank, width)
    if not wide:
        return None
    first, (rank, width) = next(iter(wide.items()))
    return make_finding(
        "rank-beyond-width",
        field="spec.method.lora.r",
        value=str(rank),
        message=f"{len(wide)} modules are narrower than their adapter's rank, such as {first.removeprefix(INSIDE_PEFT)} "
        f"with {width} channels: ranks beyond that cost memory and add nothing",
        fix=f"set spec.method.lora.rankPattern: {{{first.rpartition('.')[2]}: {width}}}, or a lower rank for all",
    )
