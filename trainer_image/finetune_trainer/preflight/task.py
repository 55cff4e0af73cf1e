"""Checks that this is a model that predicts the next token: a decoder that transformers builds as a causal language model.

Everything similar (classifiers, encoders, encoder-decoders, models of images alone) is refused by name. The libraries do not
check this: they silently load a classifier with tied embeddings, or an encoder, as a language model. This check runs before
the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.model.load import stated_config
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, CONFIG_FILE, read_json

FIELD = "spec.model.source"
SUPPORTED = "give a causal language model: a decoder whose class in config.json ends with ForCausalLM or LMHeadModel"
WITHOUT_HEAD = ("Model", "PreTrainedModel")
"""Ends of names of classes without a head for another task."""
TOKENS = 12
"""Length of the text on which causality is measured."""
TOLERANCE = 1e-4
"""Largest change of a causal model's logits; the same as LEAK_TOLERANCE of small_model.py."""


def check_task(seen: ModelInspection) -> list[Finding]:
    """Returns what config.json alone shows; nothing if it cannot be read, which other checks report."""
    plan, directory = seen.plan, seen.directory
    if (directory / ADAPTER_CONFIG_FILE).exists():
        reason = (
            f"holds {ADAPTER_CONFIG_FILE}, so transformers would load an adapter and the base that it names instead of this model"
        )
        return [_about(ADAPTER_CONFIG_FILE, "model-holds-adapter", reason, "merge the adapter, or remove its files")]
    try:
        config = stated_config(plan, directory)
        written = read_json(directory / CONFIG_FILE)
    except Exception:  # noqa: BLE001 - whatever a configuration of the user's makes a library raise
        return []
    return [*_wrong_task(config, written), *_wrong_ids(config, written)]


def _wrong_task(config: PreTrainedConfig, written: Mapping[str, Any]) -> list[Finding]:
    named = _named(written)
    mapped = AutoModelForCausalLM._model_mapping  # noqa: SLF001 - there is no public name
    if "AutoModelForCausalLM" in (written.get("auto_map") or {}):
        return []
    if config.is_encoder_decoder:
        reason = "is an encoder-decoder model, of which a language model would be the decoder alone, without what it reads"
        return [_about(named or config.model_type, "model-of-another-task", reason, SUPPORTED)]
    if type(config) not in mapped:
        reason = f"is of a kind ({config.model_type}) of which transformers builds no causal language model"
        return [_about(named or config.model_type, "model-of-another-task", reason, SUPPORTED)]
    mapping = mapped[type(config)]
    built = [each.__name__ for each in (mapping if isinstance(mapping, list | tuple) else (mapping,))]
    if not named or named in built or named.endswith(("ForCausalLM", "LMHeadModel", *WITHOUT_HEAD)):
        return []
    if named.endswith("ForConditionalGeneration") and config.get_text_config() is not config:
        reason = f"is a model of more than text; its text part is trained as {built[0]}, the rest stays as it is"
        fix = "train on text alone, or give the model of text that belongs to it"
        return [_about(named, "model-of-more-than-text", reason, fix)]
    reason = f"is a model of another task; as {built[0]} it would lose its head, and what was learnt with it"
    return [_about(named, "model-of-another-task", reason, SUPPORTED)]


def _named(written: Mapping[str, Any]) -> str:
    """Returns the class that config.json names first."""
    architectures = written.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    return first if isinstance(first, str) else ""


def _wrong_ids(config: PreTrainedConfig, written: Mapping[str, Any]) -> list[Finding]:
    """Reports special tokens that the embedding has no row for."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(rows, int):
        return []
    findings = []
    for part in (written, written.get("text_config")):
        for name, does in (("pad_token_id", "pads"), ("eos_token_id", "ends"), ("bos_token_id", "begins")):
            value = part.get(name) if isinstance(part, dict) else None
            beyond = [each for each in (value if isinstance(value, list) else [value]) if type(each) is int and each >= rows]
            if not beyond:
                continue
            reason = f"{CONFIG_FILE} {does} texts with token {beyond[0]} ({name}), and the embedding has {rows} rows (vocab_size)"
            fix = f"write the tokenizer's own {name} in {CONFIG_FILE}, or null where it has none"
            # Training needs none of them; an embedding that cannot be built with its padding row is refused when it is built.
            findings.append(
                make_finding("special-token-beyond-vocabulary", field=FIELD, value=str(beyond[0]), message=reason, fix=fix)
            )
    return findings


def causality_finding(model: PreTrainedModel) -> Finding | None:
    """Returns a finding if the logits of a token depend on a later one. `model`: a small one with random weights."""
    looked_ahead = looks_ahead(model)
    if looked_ahead <= TOLERANCE:
        return None
    reason = (
        f"is not a causal model: its logits change by {looked_ahead:.2g} with tokens that come later (measured on a small model "
        "of this architecture), so it would learn to copy what it is to predict"
    )
    return _about(type(model).__name__, "model-not-causal", reason, f"{SUPPORTED}; an encoder needs is_decoder: true to be one")


def looks_ahead(model: PreTrainedModel) -> float:
    """Returns the largest change of the logits before the last token when that is replaced, relative to the largest logit."""
    model.eval()
    size = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.arange(TOKENS) * 3 % size
    other = tokens.clone()
    other[-1] = (tokens[-1] + 1) % size
    with torch.no_grad():
        logits = [_logits(model, each)[:-1] for each in (tokens, other)]
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max().clamp(min=1))


def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Returns logits (tokens, vocabulary)."""
    torch.manual_seed(0)  # for attention that draws what it looks at
    logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits.float()


def _about(value: str, rule: str, reason: str, fix: str) -> Finding:
    """Makes a finding whose message begins with its subject."""
    return make_finding(rule, field=FIELD, value=value, message=f"{value} {reason}", fix=fix)
