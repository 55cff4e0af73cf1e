"""What transformers and PEFT know of a model type that families.py does not have: a Family, as plain data.

Importing the libraries takes seconds and memory; the model itself is built without weights. Operations on stored tensors that are
not understood exactly become `Unreadable`, so that an adapter on what they make is refused and everything else is merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_trainer.weights.families import FAMILIES, Family
from finetune_trainer.weights.name_rules import ExpertStack, NameRule, Renaming, Unreadable
from finetune_trainer.weights.tie_settings import TIE_FIELD, tie_settings


def family_of(config: Mapping[str, Any], stored: Mapping[str, Any]) -> Family:
    """The family of a model with this config.json and stored tensors of these names. Raises ImportError without transformers."""
    model_type = config.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[str(model_type)]
    found = library_family(config) if model_type else None
    # Where nobody knows the type, a file without an output embedding says that it is tied.
    return found or Family(ties_by_default="lm_head.weight" not in stored)


def library_family(config: Mapping[str, Any]) -> Family | None:
    """What the library says; None where it does not have this model type, and the model brings its own code."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    model_type = str(config["model_type"])
    if model_type not in CONFIG_MAPPING:
        return None
    plain = _with_floats({name: value for name, value in config.items() if name != "quantization_config"})
    model_config = CONFIG_MAPPING[model_type].from_dict(plain)
    # Of a model of more than text its text part is trained, which may be a class of its own, with names of its own.
    is_part = model_config.get_text_config() is not model_config and type(model_config) in AutoModelForCausalLM._model_mapping  # noqa: SLF001
    model = _structure(plain, is_part=is_part)
    found = _ties(model)
    # A configuration without ties parts all that the model shares: in Zamba 2 whole layers, which nobody asked to be written twice.
    can_part = len(found) == 1 and not _ties(_structure(plain | tie_settings(plain, is_tied=False), is_part=is_part))
    inner = getattr(model, model.base_model_prefix, None)
    return Family(
        prefix=model.base_model_prefix if inner is not None and inner is not model else "",
        # Where nothing is tied, and a configuration could ask for it: which embeddings they would be.
        ties=found or (_embeddings(model) if not config.get(TIE_FIELD) else {}),
        ties_by_default=bool(found),
        always_tied=bool(found) and (not can_part or config.get(TIE_FIELD) is False),
        rules=(
            *(_rule(transform) for transform in get_model_conversion_mapping(model, add_legacy=False)),
            *([Renaming((rf"^{model.base_model_prefix}\.",), "")] if is_part and inner is None else []),
        ),
        part=frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)) if is_part else None,
        has_transposed_experts=any(getattr(module, "is_transposed", False) for module in model.modules()),
        peft_fuses_experts=_peft_fuses_experts(model_type),
    )


def _structure(config: Mapping[str, Any], *, is_part: bool) -> Any:
    """The model that transformers makes of config.json, without weights."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    model_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    architecture = getattr(transformers, (config.get("architectures") or [""])[0], None)
    with torch.device("meta"):
        if architecture is not None and not is_part:
            return architecture(model_config)
        kinds = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModel)
        kind = next(kind for kind in kinds if type(model_config) in kind._model_mapping)  # noqa: SLF001 - no public name
        return kind.from_config(model_config)


def _ties(model: Any) -> dict[str, str]:
    """Parameter -> the one that it shares its memory with."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def _embeddings(model: Any) -> dict[str, str]:
    """The same of output and input embeddings that could be tied, as long as the model has both."""
    names = {id(module): name for name, module in model.named_modules()}
    parts = [names.get(id(module)) for module in (model.get_output_embeddings(), model.get_input_embeddings())]
    return {f"{parts[0]}.weight": f"{parts[1]}.weight"} if None not in parts else {}


def _with_floats(value: Any) -> Any:
    """JSON has no infinity: transformers 5 writes {"__float__": "Infinity"} instead."""
    if isinstance(value, Mapping):
        if len(value) == 1 and value.get("__float__") in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _rule(transform: Any) -> NameRule:
    """A WeightTransform of the library as plain data; see transformers.core_model_loading for what its fields mean."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, PrefixChange, WeightConverter, WeightRenaming

    sources, targets = tuple(transform.source_patterns), tuple(transform.target_patterns)
    scopes: tuple[str, ...] = ()
    if transform.scope_prefix is not None:
        scope = f"{transform.scope_prefix}." if transform.scope_prefix else ""
        base = f"{transform.base_model_prefix}." if transform.base_model_prefix else ""
        scopes = (base + scope, scope)
    if type(transform) in (WeightRenaming, PrefixChange) and len(targets) == 1:
        return Renaming(sources, targets[0], scopes)
    if type(transform) is WeightConverter and len(targets) == 1 and all(source.count("*.") == 1 for source in sources):
        steps = [(type(step), getattr(step, "dim", None)) for step in transform.operations]
        if steps == [(MergeModulelist, 0), (Concatenate, 1)] or (steps == [(MergeModulelist, 0)] and len(sources) == 1):
            return ExpertStack(sources, targets[0], scopes)
    steps_text = ", ".join(type(step).__name__ for step in getattr(transform, "operations", ())) or type(transform).__name__
    operations = [(type(step), getattr(step, "dim", None)) for step in getattr(transform, "operations", ())]
    joins_rows = operations == [(Concatenate, 0)] and len(targets) == 1 and not any("*" in source for source in sources)
    return Unreadable(sources, targets, steps_text, scopes, joins_rows)


def _peft_fuses_experts(model_type: str) -> bool:
    """Whether PEFT adapts old adapters of this type when it loads them; it does so by these tables of its own."""
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_FUSED_TARGETS

    return _MODEL_TO_CONVERSION_PATTERN.get(model_type) in _MOE_FUSED_TARGETS
