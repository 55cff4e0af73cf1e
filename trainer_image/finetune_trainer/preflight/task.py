"""Checks that the model predicts the next token: it must be a decoder that transformers builds as a causal language model.

Similar models (classifiers, encoders, encoder-decoders, image-only models) are refused by the names of their classes. The
libraries do not check this: they silently load a classifier with tied embeddings, or an encoder, as a language model. This check
runs before the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.model.load import stated_config
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, CONFIG_FILE, read_json

FIELD = "spec.model.source"
SUPPORTED = "give a causal language model: a decoder whose class in config.json ends with ForCausalLM or LMHeadModel"
WITHOUT_HEAD = ("Model", "PreTrainedModel")
"""Endings of the names of classes that have no head for another task."""


def check_task(seen: ModelInspection) -> list[Finding]:
    """Returns findings that config.json alone shows; none if it cannot be read, which other checks report."""
    plan, directory = seen.plan, seen.directory
    if (directory / ADAPTER_CONFIG_FILE).exists():
        reason = (
            f"holds {ADAPTER_CONFIG_FILE}, so transformers would load an adapter and the base that it names instead of this model"
        )
        return [_about(ADAPTER_CONFIG_FILE, "model-holds-adapter", reason, "merge the adapter, or remove its files")]
    try:
        config = stated_config(plan, directory)
        written = read_json(directory / CONFIG_FILE)
    except Exception:  # noqa: BLE001 - a user's configuration can make a library raise anything
        return []
    return [*_wrong_task(config, written), *_wrong_ids(config, written)]


def _wrong_task(config: PreTrainedConfig, written: Mapping[str, Any]) -> list[Finding]:
    # Only the first class that config.json names counts.
    architectures = written.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else ""
    named = named if isinstance(named, str) else ""
    mapped = AutoModelForCausalLM._model_mapping  # noqa: SLF001 - there is no public name
    if "AutoModelForCausalLM" in (written.get("auto_map") or {}):
        return []
    if config.is_encoder_decoder:
        reason = "is an encoder-decoder model; as a language model it would be the decoder alone, without the encoder's input"
        return [_about(named or config.model_type, "model-of-another-task", reason, SUPPORTED)]
    if type(config) not in mapped:
        reason = f"is of a kind ({config.model_type}) for which transformers has no causal language model"
        return [_about(named or config.model_type, "model-of-another-task", reason, SUPPORTED)]
    mapping = mapped[type(config)]
    built = [built_class.__name__ for built_class in (mapping if isinstance(mapping, list | tuple) else (mapping,))]
    if not named or named in built or named.endswith(("ForCausalLM", "LMHeadModel", *WITHOUT_HEAD)):
        return []
    if named.endswith("ForConditionalGeneration") and config.get_text_config() is not config:
        reason = f"is a model of more than text; its text part is trained as {built[0]}, the rest stays as it is"
        fix = "train on text alone, or give the model of text that belongs to it"
        return [_about(named, "model-of-more-than-text", reason, fix)]
    reason = f"is a model of another task; as {built[0]} it would lose its head, and what was learnt with it"
    return [_about(named, "model-of-another-task", reason, SUPPORTED)]


def _wrong_ids(config: PreTrainedConfig, written: Mapping[str, Any]) -> list[Finding]:
    """Reports special tokens for which the embedding has no row."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(rows, int):
        return []
    findings = []
    for part in (written, written.get("text_config")):
        for name, does in (("pad_token_id", "pads"), ("eos_token_id", "ends"), ("bos_token_id", "begins")):
            value = part.get(name) if isinstance(part, dict) else None
            beyond = [token for token in (value if isinstance(value, list) else [value]) if type(token) is int and token >= rows]
            if not beyond:
                continue
            reason = f"{CONFIG_FILE} {does} texts with token {beyond[0]} ({name}), and the embedding has {rows} rows (vocab_size)"
            fix = f"write the tokenizer's own {name} in {CONFIG_FILE}, or null where it has none"
            # Only a warning: training does not use these tokens, and building the embedding refuses a bad pad_token_id.
            findings.append(
                make_finding("special-token-beyond-vocabulary", field=FIELD, value=str(beyond[0]), message=reason, fix=fix)
            )
    return findings


def _about(value: str, rule: str, reason: str, fix: str) -> Finding:
    """Makes a finding whose message begins with its subject."""
    return make_finding(rule, field=FIELD, value=value, message=f"{value} {reason}", fix=fix)
