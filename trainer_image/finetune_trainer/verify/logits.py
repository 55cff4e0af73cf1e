"""Compares the logits of base + adapters, as PEFT computes them, with those of the merged model, in bounded memory.

Input: directories and token ids. Output: LogitFigures. Called by verification.py. It uses none of the merge's arithmetic, so it
also catches mistakes that merge and tensor check share: names, orientation, scaling, ties. Each batch of prompts goes through one
model after the other, so memory does not grow with the number of prompts. Logits are kept on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.verify.figures import LogitsFile, PromptFigures, figures_of_prompts, figures_together
from finetune_trainer.verify.gate import LogitFigures
from finetune_trainer.verify.model_class import Build, UnverifiableModelError, config_of, model_builder
from finetune_trainer.verify.skeleton import HOST, MergedWeights, WeightSource, element_types, skeleton_model
from finetune_trainer.verify.stored_weights import StoredWeights
from finetune_trainer.verify.streaming import Prompt, StreamedModel, batches, return_freed_memory
from finetune_trainer.weights.headers import CONFIG_FILE, read_json

MAX_PROMPT_POSITIONS = 512
"""Maximum number of tokens of a prompt; longer prompts are cut."""


@dataclass(frozen=True)
class Reference:
    """Base + adapters. The base is as stored, or as quantised in training.

    allow_remote_code: whether the model's own code may run. device: device on which the model is computed.
    """

    base: Path
    adapters: Sequence[Path]
    quantized: Mapping[str, Quantization] | None = None
    allow_remote_code: bool = False
    device: torch.device = HOST


def compare_logits(
    references: Sequence[Reference], merged: Path, prompts: Sequence[Sequence[int]], scratch: Path, *, is_peft_merge: bool = False
) -> list[LogitFigures]:
    """Compare the merged model with each reference, on the device of the first reference.

    prompts: token ids; no prompt may be empty. scratch: directory for logits. is_peft_merge: whether the weights in `merged` are
    replaced by PEFT's own merge of the first reference. Raises ValueError if prompts are missing or empty,
    UnverifiableModelError for a large model that uses weights outside of their layers, MergeError for a broken model.
    """
    if not prompts or not all(prompts):
        raise ValueError(f"prompts: {len(prompts)} given; each must hold at least one token id, or nothing is compared.")
    return_freed_memory()
    allow_remote_code = any(reference.allow_remote_code for reference in references)
    chooses = chooses_experts(read_json(merged / CONFIG_FILE))
    start = decoder_start(merged, allow_remote_code=allow_remote_code)
    ids_of_prompts = [tuple(prompt[:MAX_PROMPT_POSITIONS]) for prompt in prompts]
    # An encoder-decoder gets a prompt twice: as the encoder's input and, shifted, as the decoder's.
    chosen = [Prompt(ids, None if start is None else (start, *ids[:-1])) for ids in ids_of_prompts]
    merged_alone = Reference(merged, (), allow_remote_code=allow_remote_code, device=references[0].device)
    build = model_builder(references[0].base, references[0].adapters, allow_remote_code=allow_remote_code)
    own = _weights(references[0], references[0].adapters, build) if is_peft_merge else None
    (merged_model,) = streamed_models(merged_alone, build, own)
    models = [streamed_models(reference, build) for reference in references]
    figures: list[list[PromptFigures]] = [[] for _ in references]
    with tempfile.TemporaryDirectory(prefix="verify-", dir=scratch) as name:
        for batch in batches(chosen):
            result = _stored_logits(merged_model, merged_alone, batch, Path(name) / "merged")
            for number, reference in enumerate(references):
                base, adapted = (
                    _stored_logits(model, reference, batch, Path(name) / label)
                    for label, model in zip(("base", "adapted"), models[number], strict=True)
                )
                figures[number] += figures_of_prompts(list(zip(adapted, base, result, strict=True)))
    return [figures_together(figures_of_reference, chooses_experts=chooses) for figures_of_reference in figures]


def chooses_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, or a part of it, states more than one expert."""
    counts = [value for name, value in config.items() if "expert" in name and type(value) is int]
    return any(count > 1 for count in counts) or any(chooses_experts(part) for part in config.values() if isinstance(part, dict))


def streamed_models(reference: Reference, build: Build | None = None, of_base: WeightSource | None = None) -> list[StreamedModel]:
    """Return the base, and base + adapters if there are adapters.

    build: builds both; None: `model_builder` chooses. of_base: the base's weights; None: those in its files.
    """
    allow = reference.allow_remote_code
    build = build or model_builder(reference.base, reference.adapters, allow_remote_code=allow)
    stored = StoredWeights(reference.base, reference.quantized, reference.adapters)
    types = element_types(reference.base, build, allow_remote_code=allow)
    pairs: list[tuple[WeightSource, Path | None]] = [(of_base or stored, None)]
    pairs += [(_weights(reference, reference.adapters[:-1], build), last) for last in reference.adapters[-1:]]
    return [
        StreamedModel(
            skeleton_model(stored, adapter, build, types, device=reference.device, allow_remote_code=allow),
            source,
            stored.num_bytes,
        )
        for source, adapter in pairs
    ]


def _weights(reference: Reference, adapters: Sequence[Path], build: Build) -> WeightSource:
    """Return the base's weights with `adapters` merged into them by PEFT."""
    stored = StoredWeights(reference.base, reference.quantized, reference.adapters)
    weights: WeightSource = stored
    for adapter in adapters:
        weights = MergedWeights(stored, weights, adapter, build, allow_remote_code=reference.allow_remote_code)
    return weights


def _stored_logits(model: StreamedModel, reference: Reference, prompts: Sequence[Prompt], prefix: Path) -> list[LogitsFile]:
    """Write the logits of each prompt to a file whose name begins with `prefix`. Raises UnverifiableModelError, MergeError."""
    try:
        logits_of_prompts = model.logits(prompts)
    except RuntimeError as error:  # torch refuses some operations on meta tensors
        raise UnverifiableModelError(
            f"{reference.base} cannot be verified on {reference.device} ({error}). Publish the adapter alone "
            "(merge.enabled: false)."
        ) from error
    files = []
    for number, logits in enumerate(logits_of_prompts):
        path = prefix.with_name(f"{prefix.name}-{number}")
        # Logits are written row after row, in their own dtype.
        path.write_bytes(logits.contiguous().view(-1).view(torch.uint8).numpy().data)
        files.append(LogitsFile(path, len(logits), model.dtype))
    return files


def decoder_start(directory: Path, *, allow_remote_code: bool = False) -> int | None:
    """Return the first token of the decoder's input for an encoder-decoder, None for other models."""
    config = config_of(directory, allow_remote_code=allow_remote_code)
    if not config.is_encoder_decoder:
        return None
    start = getattr(config, "decoder_start_token_id", None)
    return int(start if start is not None else config.pad_token_id or 0)
