"""Logits of base + adapters through PEFT against the merged model, on given prompts, in bounded memory.

In: directories and token ids. Out: LogitFigures. Called by verification.py. It uses none of the merge's arithmetic, so it also
catches mistakes that merge and tensor check share: names, orientation, scaling, ties. Prompts go through in waves, so that
neither activations nor the logits, which are kept on disk, grow with their number.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.processes.torch_threads import one_thread_for_each_operation
from finetune_trainer.verify.figures import LogitsFile, PromptFigures, figures_of_prompts, figures_together
from finetune_trainer.verify.gate import LogitFigures
from finetune_trainer.verify.logits_of_each import logits_of_each
from finetune_trainer.verify.skeleton import (
    HOST,
    MergedWeights,
    WeightSource,
    element_types,
    model_class,
    skeleton_model,
)
from finetune_trainer.verify.stored_weights import StoredWeights, return_freed_memory
from finetune_trainer.verify.streaming import (
    Prompt,
    StreamedModels,
    UnverifiableModelError,
    batches,
    logits_of,
    write_logits,
)
from finetune_trainer.weights.headers import CONFIG_FILE, read_json

log = logging.getLogger(__name__)

MAX_PROMPT_POSITIONS = 512
"""Longer prompts are cut: one prompt's logits are in memory at a time, or those of some short ones."""
MAX_WAVE_POSITIONS = 4096
"""Positions of one pass over the weights. Each batch of prompts has two threads, one for the base and one for base + adapters."""
MAX_WHOLE_BYTES = 4 << 30
"""Of a model that cannot be streamed and is loaded whole instead."""

ADAPTED, BASE, MERGED = "adapted", "base", "merged"


@dataclass(frozen=True)
class Reference:
    """Base + adapters; the base is as stored or as a quantised training saw it.

    allow_remote_code: whether its own code may run. device: on which it is computed, unless that turns out to be impossible.
    """

    base: Path
    adapters: Sequence[Path]
    quantized: Mapping[str, Quantization] | None = None
    allow_remote_code: bool = False
    device: torch.device = HOST


def compare_logits(
    references: Sequence[Reference], merged: Path, prompts: Sequence[Sequence[int]], scratch: Path
) -> list[LogitFigures]:
    """Figures of the merged model against each reference, on the device of the first.

    prompts: token ids, each at least one token. scratch: directory for logits. Raises ValueError without prompts or with an empty
    one, UnverifiableModelError for a model that can neither be streamed nor fits into memory, MergeError for a broken one.
    """
    if not prompts or not all(prompts):
        raise ValueError(f"prompts: {len(prompts)} given, each must hold at least one token id, or nothing is compared.")
    return_freed_memory()
    allow_remote_code = any(reference.allow_remote_code for reference in references)
    start, chooses = _decoder_start(merged, allow_remote_code=allow_remote_code), chooses_experts(read_json(merged / CONFIG_FILE))
    chosen = [_prompt(prompt[:MAX_PROMPT_POSITIONS], start) for prompt in prompts]
    figures: list[list[PromptFigures]] = [[] for _ in references]
    with tempfile.TemporaryDirectory(prefix="verify-", dir=scratch) as name:
        directory = Path(name)
        merged_alone = Reference(merged, (), allow_remote_code=allow_remote_code, device=references[0].device)
        with one_thread_for_each_operation():  # what is built is in small pieces
            models = [_StreamedOrWholeModels(reference, (BASE, ADAPTED), directory) for reference in references]
            result = _StreamedOrWholeModels(merged_alone, (MERGED,), directory)
        for wave in _waves(chosen):
            *expected, of_merged = logits_of_each([*models, result], wave, directory)
            merged_files = of_merged[MERGED]
            for number, model in enumerate(models):
                of_prompts = [
                    (
                        LogitsFile(adapted, prompt.num_positions, model.dtype),
                        LogitsFile(base, prompt.num_positions, model.dtype),
                        LogitsFile(other, prompt.num_positions, result.dtype),
                    )
                    for adapted, base, other, prompt in zip(
                        expected[number][ADAPTED], expected[number][BASE], merged_files, wave, strict=True
                    )
                ]
                figures[number] += figures_of_prompts(of_prompts)
        del models, result
    gc.collect()
    return [figures_together(figures_of_reference, chooses_experts=chooses) for figures_of_reference in figures]


def chooses_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, or a part of it, counts experts."""
    counts = [value for name, value in config.items() if "expert" in name and type(value) is int]
    return any(count > 1 for count in counts) or any(chooses_experts(part) for part in config.values() if isinstance(part, dict))


def _waves(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """The prompts in order, as many together as one pass may hold, at least one."""
    wave: list[Prompt] = []
    for prompt in prompts:
        num_positions = sum(waiting.num_positions for waiting in (*wave, prompt))
        if wave and num_positions > MAX_WAVE_POSITIONS:
            yield wave
            wave = []
        wave.append(prompt)
    yield wave


def _prompt(ids: Sequence[int], start: int | None) -> Prompt:
    """A prompt. An encoder-decoder gets it twice: whole, and as the decoder's input."""
    return Prompt(tuple(ids), None if start is None else (start, *ids[:-1]))


def _decoder_start(directory: Path, *, allow_remote_code: bool = False) -> int | None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
    if not config.is_encoder_decoder:
        return None
    start = getattr(config, "decoder_start_token_id", None)
    return int(start if start is not None else config.pad_token_id or 0)


class _StreamedOrWholeModels:
    """Streams module by module; if that turns out to be impossible, layer by layer; and then loads models whole."""

    def __init__(self, reference: Reference, labels: Sequence[str], scratch: Path) -> None:
        self._reference, self._labels, self._scratch = reference, labels, scratch
        self._by_layer, self._device = False, reference.device
        self._streamed = self._made()
        self._whole: _WholeModels | None = None

    def _made(self) -> list[StreamedModels]:
        reference, labels = self._reference, self._labels
        stored = StoredWeights(reference.base, reference.quantized, reference.adapters)
        weights: WeightSource = stored
        allow = reference.allow_remote_code
        for adapter in reference.adapters[:-1]:
            weights = MergedWeights(stored, weights, adapter, allow_remote_code=allow)
        last = {label: reference.adapters[-1] if label == ADAPTED else None for label in labels}
        types = element_types(reference.base, allow_remote_code=allow)
        skeletons = {
            label: skeleton_model(stored, adapter, types, device=self._device, allow_remote_code=allow)
            for label, adapter in last.items()
        }
        self.dtype = skeletons[labels[0]].dtype
        # The base alone is read together with base + adapter, unless other adapters come between the two.
        groups = [skeletons] if weights is stored else [{label: model} for label, model in skeletons.items()]
        return [
            StreamedModels(weights if ADAPTED in group else stored, group, self._scratch, by_layer=self._by_layer)
            for group in groups
        ]

    @property
    def is_whole(self) -> bool:
        return self._whole is not None

    def logits(self, prompts: Sequence[Prompt], directory: Path) -> dict[str, list[Path]]:
        if self._whole is not None:
            return self._whole.logits(prompts, directory)
        return {label: files for each in self._streamed for label, files in each.logits(prompts, directory).items()}

    def fall_back(self, error: Exception) -> None:
        if self._whole is not None:
            raise error
        self._streamed = []
        if self._device != HOST:
            log.warning("%s: compared on the CPU, because on %s: %s", self._reference.base, self._device, error)
            self._device = HOST
            self._streamed = self._made()
        elif self._by_layer:
            self._whole = _WholeModels(self._reference, self._labels, str(error))
        else:
            self._by_layer = True
            self._streamed = self._made()


def _require_whole(base: Path, num_bytes: int, reason: str) -> None:
    """A base that cannot be streamed can be loaded whole. Raises UnverifiableModelError."""
    if num_bytes > MAX_WHOLE_BYTES:
        raise UnverifiableModelError(
            f"{base}: cannot be verified layer by layer ({reason}), and {num_bytes} bytes are more than the {MAX_WHOLE_BYTES} "
            "that are loaded whole. Publish the adapter alone (merge.enabled: false)."
        )


class _WholeModels:
    """Models that are loaded whole for each wave, one at a time."""

    is_whole = True

    def __init__(self, reference: Reference, labels: Sequence[str], reason: str) -> None:
        self._reference, self._labels = reference, labels
        self._stored = StoredWeights(reference.base, reference.quantized, reference.adapters)
        _require_whole(reference.base, self._stored.num_bytes, reason)
        self.dtype = torch.get_default_dtype()

    def logits(self, prompts: Sequence[Prompt], directory: Path) -> dict[str, list[Path]]:
        base, allow = self._reference.base, self._reference.allow_remote_code
        loaded: PreTrainedModel = model_class(base, allow_remote_code=allow).from_pretrained(
            base, dtype="auto", trust_remote_code=allow, local_files_only=True, use_safetensors=True
        )
        self.dtype = loaded.dtype
        if self._stored.num_rows is not None:
            loaded.resize_token_embeddings(self._stored.num_rows, mean_resizing=False)
        model: nn.Module = loaded
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if self._reference.quantized or name in self._stored.resized:
                    parameter.copy_(self._stored.whole(name, parameter.dtype))
        files: dict[str, list[Path]] = {}
        for label in sorted(self._labels, key=lambda label: label == ADAPTED):
            if label == ADAPTED:
                model = _with_adapters(model, self._reference.adapters)
            model.eval()
            files[label] = [directory / f"{label}-{number}" for number in range(len(prompts))]
            for batch in batches(prompts):
                batch_logits = logits_of(model, [prompts[number] for number in batch], self.dtype)
                for number, logits in zip(batch, batch_logits, strict=True):
                    write_logits(logits, files[label][number])
        return files

    def fall_back(self, error: Exception) -> None:
        raise error


def _with_adapters(model: nn.Module, adapters: Sequence[Path]) -> nn.Module:
    for adapter in adapters[:-1]:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=False)
    adapted: nn.Module = PeftModel.from_pretrained(model, str(adapters[-1]))
    return adapted
