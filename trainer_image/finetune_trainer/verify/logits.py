"""Logits of base + adapters through PEFT against the merged model, on given prompts, in bounded memory.

In: directories and token ids. Out: LogitFigures. Called by verification.py. Nothing of the merge's arithmetic takes part: this
also catches what merge and tensor check might get wrong in the same way: names, orientation, scaling, ties. Prompts go through
in waves, so that neither activations nor the logits, which wait on disk, grow with their number.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.verify.gate import TIE_UNITS, UNIT_ROUNDOFF, LogitFigures, judged_share
from finetune_trainer.verify.skeleton import MergedWeights, WeightSource, model_class, needs_base_weights, skeleton_model
from finetune_trainer.verify.stored_weights import StoredWeights, return_freed_memory
from finetune_trainer.verify.streaming import (
    NotStreamableError,
    Prompt,
    StreamedModels,
    UnverifiableModelError,
    batches,
    logits_of,
    write_logits,
)
from finetune_trainer.weights.headers import CONFIG_FILE, read_json

VALUES_AT_ONCE = 1 << 20
"""Logits that are held in fp64 at a time, several times over."""
MAX_PROMPT_POSITIONS = 512
"""Longer prompts are cut: one prompt's logits are in memory at a time, or those of some short ones."""
MAX_WAVE_POSITIONS = 4096
"""Of one pass over the weights; each batch of prompts has two threads, one for the base and one for base + adapters."""
MAX_WHOLE_BYTES = 4 << 30
"""Of a model that cannot be streamed and is loaded whole instead."""
FROM_BASE_WEIGHTS = "its adapter is made from the base's weights"

ADAPTED, BASE, MERGED = "adapted", "base", "merged"


@dataclass(frozen=True)
class Reference:
    """Base + adapters, the base as stored or as a quantised training saw it. allow_remote_code: whether its own code may run."""

    base: Path
    adapters: Sequence[Path]
    quantized: Mapping[str, Quantization] | None = None
    allow_remote_code: bool = False


class LogitModels(Protocol):
    """What gives logits of one or more models."""

    dtype: torch.dtype

    def logits(self, prompts: Sequence[Prompt], directory: Path) -> dict[str, list[Path]]:
        """By model, a file for each prompt; see streaming.py."""


def compare_logits(
    references: Sequence[Reference], merged: Path, prompts: Sequence[Sequence[int]], scratch: Path
) -> list[LogitFigures]:
    """Figures of the merged model against each reference.

    prompts: token ids, each at least one token. scratch: where logits are kept meanwhile. Raises ValueError without prompts or
    with an empty one, UnverifiableModelError for a model that can neither be streamed nor fits into memory, MergeError for a
    broken one.
    """
    if not prompts or not all(prompts):
        raise ValueError(f"prompts: {len(prompts)} given, each must hold at least one token id, or nothing is compared.")
    return_freed_memory()
    allow_remote_code = any(reference.allow_remote_code for reference in references)
    start, chooses = _decoder_start(merged, allow_remote_code=allow_remote_code), chooses_experts(read_json(merged / CONFIG_FILE))
    chosen = [_prompt(prompt[:MAX_PROMPT_POSITIONS], start) for prompt in prompts]
    sums = [_FigureSums(chooses) for _ in references]
    with tempfile.TemporaryDirectory(prefix="verify-", dir=scratch) as name:
        directory = Path(name)
        models = [_models_of(reference, (BASE, ADAPTED), directory) for reference in references]
        result = _models_of(Reference(merged, (), allow_remote_code=allow_remote_code), (MERGED,), directory)
        for wave in _waves(chosen):
            expected = []
            for number, model in enumerate(models):
                (directory / str(number)).mkdir(exist_ok=True)
                expected.append(model.logits(wave, directory / str(number)))
            found = result.logits(wave, directory)[MERGED]
            for number, model in enumerate(models):
                for adapted, base, other, prompt in zip(
                    expected[number][ADAPTED], expected[number][BASE], found, wave, strict=True
                ):
                    sums[number].add(
                        _LogitsFile(adapted, prompt.num_positions, model.dtype),
                        _LogitsFile(base, prompt.num_positions, model.dtype),
                        _LogitsFile(other, prompt.num_positions, result.dtype),
                    )
        del models, result
    gc.collect()
    return [each.figures(len(prompts)) for each in sums]


@dataclass(frozen=True)
class _LogitsFile:
    """On disk: (positions, vocabulary)."""

    file: Path
    num_positions: int
    dtype: torch.dtype

    @property
    def vocabulary(self) -> int:
        return self.file.stat().st_size // self.dtype.itemsize // self.num_positions

    def positions(self, first: int, last: int) -> torch.Tensor:
        """fp32 (last - first, vocabulary)."""
        size = self.vocabulary * self.dtype.itemsize
        raw = np.fromfile(self.file, dtype=np.uint8, count=(last - first) * size, offset=first * size)
        return torch.from_numpy(raw).view(self.dtype).view(last - first, -1).float()


def chooses_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, or a part of it, counts experts."""
    counts = [value for name, value in config.items() if "expert" in name and type(value) is int]
    return any(count > 1 for count in counts) or any(chooses_experts(part) for part in config.values() if isinstance(part, dict))


class _FigureSums:
    def __init__(self, chooses_experts: bool) -> None:
        self._chooses_experts = chooses_experts
        self._differences: list[torch.Tensor] = []
        """The largest at each position."""
        self._divergences: list[torch.Tensor] = []
        self._effects: list[torch.Tensor] = []
        self._num_positions = self._num_agreeing = 0
        self._max_abs_difference = self._max_abs_logit = torch.tensor(0.0)

    def add(self, reference: _LogitsFile, base: _LogitsFile, merged: _LogitsFile) -> None:
        """One prompt, block by block. A vocabulary of another size leaves NaN, which passes no gate."""
        tolerance = TIE_UNITS * max(UNIT_ROUNDOFF[str(logits.dtype).removeprefix("torch.")] for logits in (reference, merged))
        self._num_positions += reference.num_positions
        if reference.vocabulary != merged.vocabulary:
            self._max_abs_difference = torch.tensor(torch.nan)
            for each in (self._differences, self._divergences, self._effects):
                each.append(self._max_abs_difference[None])
            return
        step = max(1, VALUES_AT_ONCE // reference.vocabulary)
        for first in range(0, reference.num_positions, step):
            last = min(first + step, reference.num_positions)
            expected, found = reference.positions(first, last), merged.positions(first, last)
            # torch's maximum keeps a NaN that comes second, Python's drops it.
            self._differences.append((expected - found).abs().max(dim=1).values)
            self._max_abs_difference = torch.maximum(self._max_abs_difference, self._differences[-1].max())
            self._max_abs_logit = torch.maximum(self._max_abs_logit, expected.abs().max())
            divergence, effect = _kl(expected, found, base.positions(first, last))
            self._divergences.append(divergence)
            self._effects.append(effect)
            best, largest = expected.max(dim=1).values, expected.abs().max(dim=1).values
            chosen = expected.gather(1, found.argmax(dim=1, keepdim=True)).squeeze(1)
            self._num_agreeing += int((best - chosen <= tolerance * largest).sum())

    def figures(self, num_prompts: int) -> LogitFigures:
        share = judged_share(chooses_experts=self._chooses_experts)
        # NaN where one of them is.
        usual = torch.cat(self._differences).quantile(share, interpolation="higher")
        return LogitFigures(
            num_prompts=num_prompts,
            num_positions=self._num_positions,
            max_abs_difference=float(self._max_abs_difference),
            usual_abs_difference=float(usual),
            max_abs_logit=float(self._max_abs_logit),
            mean_kl=mean_of_least(torch.cat(self._divergences), share),
            effect_mean_kl=mean_of_least(torch.cat(self._effects), share),
            top1_agreement=self._num_agreeing / self._num_positions,
            chooses_experts=self._chooses_experts,
        )


def _kl(reference: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """KL(reference || other) at each position for each other, in nats, from logits (positions, vocabulary)."""
    first = reference.double()
    total = first.logsumexp(dim=1, keepdim=True)
    probabilities = (first - total).exp_()
    found = []
    for other in others:
        second = other.double()
        total_of_second = second.logsumexp(dim=1)
        # A token that the model rules out has the logit -inf in both and adds nothing.
        terms = torch.sub(first, second, out=second).masked_fill_(first.isneginf() & other.isneginf(), 0.0).mul_(probabilities)
        found.append(terms.sum(dim=1) - total.squeeze(1) + total_of_second)
    return found


def mean_of_least(values: torch.Tensor, share: float) -> float:
    """Mean of that share of the values, the least of them; NaN where any value is."""
    if values.isnan().any():
        return math.nan
    return float(values.sort().values[: math.ceil(share * len(values))].mean())


def _waves(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """The prompts in order, as many together as one pass may hold, at least one."""
    wave: list[Prompt] = []
    for prompt in prompts:
        num_positions = sum(each.num_positions for each in (*wave, prompt))
        if wave and num_positions > MAX_WAVE_POSITIONS:
            yield wave
            wave = []
        wave.append(prompt)
    yield wave


def _prompt(ids: Sequence[int], start: int | None) -> Prompt:
    """An encoder-decoder is given the prompt twice: whole, and as what the decoder is to say."""
    return Prompt(tuple(ids), None if start is None else (start, *ids[:-1]))


def _decoder_start(directory: Path, *, allow_remote_code: bool = False) -> int | None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
    if not config.is_encoder_decoder:
        return None
    start = getattr(config, "decoder_start_token_id", None)
    return int(start if start is not None else config.pad_token_id or 0)


class _StreamedOrWholeModels:
    """Module by module; from the first time on that this turns out to be impossible, layer by layer, and then whole."""

    def __init__(self, reference: Reference, labels: Sequence[str], scratch: Path) -> None:
        self._reference, self._labels, self._scratch = reference, labels, scratch
        self._by_layer = False
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
        skeletons = {label: skeleton_model(stored, adapter, allow_remote_code=allow) for label, adapter in last.items()}
        self.dtype = skeletons[labels[0]].dtype
        # The base alone is read together with base + adapter, except where other adapters come between the two.
        groups = [skeletons] if weights is stored else [{label: model} for label, model in skeletons.items()]
        return [
            StreamedModels(weights if ADAPTED in group else stored, group, self._scratch, by_layer=self._by_layer)
            for group in groups
        ]

    def logits(self, prompts: Sequence[Prompt], directory: Path) -> dict[str, list[Path]]:
        while self._whole is None:
            try:
                return {label: files for each in self._streamed for label, files in each.logits(prompts, directory).items()}
            # torch refuses some of what is done to a weight that is not there.
            except (NotStreamableError, RuntimeError) as error:
                self._streamed = []
                if self._by_layer:
                    self._whole = _WholeModels(self._reference, self._labels, str(error))
                else:
                    self._by_layer = True
                    self._streamed = self._made()
        return self._whole.logits(prompts, directory)


def require_whole(base: Path, num_bytes: int, reason: str) -> None:
    """A base that cannot be streamed can be loaded whole. Raises UnverifiableModelError; preflight asks, too."""
    if num_bytes > MAX_WHOLE_BYTES:
        raise UnverifiableModelError(
            f"{base}: cannot be verified layer by layer ({reason}), and {num_bytes} bytes are more than the {MAX_WHOLE_BYTES} "
            "that are loaded whole. Publish the adapter alone (merge.enabled: false)."
        )


class _WholeModels:
    """Models of which one at a time is loaded whole for each wave."""

    def __init__(self, reference: Reference, labels: Sequence[str], reason: str) -> None:
        self._reference, self._labels = reference, labels
        self._stored = StoredWeights(reference.base, reference.quantized, reference.adapters)
        require_whole(reference.base, self._stored.num_bytes, reason)
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
                found = logits_of(model, [prompts[number] for number in batch], self.dtype)
                for number, logits in zip(batch, found, strict=True):
                    write_logits(logits, files[label][number])
        return files


def _with_adapters(model: nn.Module, adapters: Sequence[Path]) -> nn.Module:
    for adapter in adapters[:-1]:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=False)
    adapted: nn.Module = PeftModel.from_pretrained(model, str(adapters[-1]))
    return adapted


def _models_of(reference: Reference, labels: Sequence[str], scratch: Path) -> LogitModels:
    if any(needs_base_weights(adapter) for adapter in reference.adapters):
        return _WholeModels(reference, labels, FROM_BASE_WEIGHTS)
    return _StreamedOrWholeModels(reference, labels, scratch)
