"""Runs forward passes of a model with one unit in memory at a time: all of a small model, or one layer of a larger model.

Hooks load the weights of a layer when it begins, and drop them when the next layer begins. So memory holds the largest layer, the
adapter, and the activations between two layers. A loop over layers would have to know how each architecture connects them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn

from finetune_trainer.verify.skeleton import HOST, ParameterSlot, SkeletonModel, WeightSource, offload

MAX_WHOLE_BYTES = 4 << 30
"""Maximum size of a model that is loaded whole. Such a model may use weights outside the layers that own them."""
MAX_BATCH_POSITIONS = 2048
"""Maximum number of positions in a batch of prompts. All logits of a batch are in memory at once, and the weights are read again
for each batch.
"""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
OWN_PAGES_BYTES, KEPT_BYTES = 8 << 20, 16 << 20


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt. decoder_ids: the decoder's input in an encoder-decoder, at whose positions logits are compared."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] | None = None

    @property
    def num_positions(self) -> int:
        return len(self.decoder_ids or self.ids)


def batches(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Group prompts into batches that go through a model together. Each batch has its longest prompt first.

    Shorter prompts of a batch are padded at their ends. A decoder's earlier positions do not see the padding, and all compared
    models get the same padding. A prompt gets at most as much padding as it is long. An encoder sees all of its input, so batches
    of encoder-decoders have prompts of one length only.
    """
    batches_so_far: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda prompt: -prompt.num_positions):
        batch = batches_so_far[-1] if batches_so_far else []
        longest = batch[0].num_positions if batch else 0
        shortest_allowed = longest if prompt.decoder_ids is not None else longest / 2
        if batch and (len(batch) + 1) * longest <= MAX_BATCH_POSITIONS and prompt.num_positions >= shortest_allowed:
            batch.append(prompt)
        else:
            batches_so_far.append([prompt])
    return batches_so_far


class StreamedModel:
    """A skeleton whose weights are loaded whenever they are used."""

    def __init__(self, skeleton: SkeletonModel, weights: WeightSource, num_bytes: int) -> None:
        """num_bytes: size of the weights, which decides whether they are loaded whole or layer by layer."""
        self._skeleton, self._weights = skeleton, weights
        self._loaded: Sequence[ParameterSlot] = ()
        self._is_whole = num_bytes <= MAX_WHOLE_BYTES
        self.base = skeleton.base
        self.dtype: torch.dtype = skeleton.base.dtype
        if self._is_whole:
            return
        by_module: dict[int, list[ParameterSlot]] = {}
        for slot in skeleton.slots:
            by_module.setdefault(id(slot.module), []).append(slot)
        lists = (module for module in skeleton.model.modules() if isinstance(module, nn.ModuleList))
        layers = frozenset(id(layer) for members in lists for layer in members)
        for module, slots in _units(skeleton.model, by_module, layers):
            module.register_forward_pre_hook(lambda _module, _arguments, slots=slots: self._load(slots))
        # Both models need the check: PEFT calls the base without running the base's hooks, and generation calls the base alone.
        for model in {skeleton.model, skeleton.base}:
            model.register_forward_hook(lambda _model, _arguments, output: require_all_weights(output.logits))

    @contextmanager
    def running(self) -> Iterator[Any]:
        """Yield the model for forward passes within the block. They raise RuntimeError if weights are used outside of their
        layer, and MergeError if files cannot be read.
        """
        try:
            if self._is_whole:
                self._load(self._skeleton.slots)
            yield self._skeleton.model
        finally:
            self._load(())

    def logits(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        """Return each prompt's logits (positions, vocabulary), in the model's dtype, on the CPU. Raises as `running` does."""
        inputs = {"input_ids": _filled_up([prompt.ids for prompt in prompts])}
        of_decoder = [prompt.decoder_ids for prompt in prompts if prompt.decoder_ids is not None]
        if of_decoder:
            inputs["decoder_input_ids"] = _filled_up(of_decoder)
        with self.running() as model, torch.inference_mode():
            inputs = {name: ids.to(self.base.device) for name, ids in inputs.items()}
            logits: torch.Tensor = model(**inputs, use_cache=False).logits.to(HOST)
        # Some models return float32, whatever dtype they computed in.
        return [of_prompt[: prompt.num_positions].to(self.dtype) for of_prompt, prompt in zip(logits, prompts, strict=True)]

    def _load(self, slots: Sequence[ParameterSlot]) -> None:
        """Drop the loaded parameters, and load those of `slots`."""
        for slot in self._loaded:
            offload(slot)
        self._loaded = slots
        values: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        for slot in slots:
            key = slot.path, slot.dtype
            if key not in values:
                values[key] = self._weights.whole(slot.path, slot.dtype).to(slot.device)
            slot.module._parameters[slot.name] = nn.Parameter(values[key], requires_grad=False)  # noqa: SLF001


def return_freed_memory() -> None:
    """Let this process return the memory of dropped weights to the system; by default glibc keeps it in its heap."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, OWN_PAGES_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def require_all_weights(logits: torch.Tensor) -> None:
    """Check that all weights were loaded when they were used. Missing weights are NaN. Raises RuntimeError."""
    if logits.isnan().any():
        raise RuntimeError("weights are used outside of the layer that owns them, or a weight is NaN")


def _filled_up(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return a tensor (rows, longest row), in which shorter rows repeat their last token."""
    length = max(len(row) for row in rows)
    return torch.tensor([[*row, *([row[-1]] * (length - len(row)))] for row in rows])


def _units(
    module: nn.Module, by_module: Mapping[int, list[ParameterSlot]], layers: frozenset[int]
) -> Iterator[tuple[nn.Module, list[ParameterSlot]]]:
    """Yield the outermost modules that are layers or own weights, each with the slots in it."""
    if id(module) in by_module or id(module) in layers or isinstance(module, BaseTunerLayer | TrainableTokensWrapper):
        within = {id(part): part for part in module.modules()}
        slots = [slot for key in within for slot in by_module.get(key, ())]
        if slots:
            yield module, slots
        return
    for child in {id(child): child for child in module.children()}.values():
        yield from _units(child, by_module, layers)
