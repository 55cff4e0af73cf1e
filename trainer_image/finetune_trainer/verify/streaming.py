"""Forward passes of a model whose weights are in memory one unit at a time, each read once for all prompts.

A unit is an outermost module that owns weights, a whole layer of PEFT's, or a decoder layer if a model's own code reads weights
of other modules. Batches of prompts run as cooperative threads that meet at every unit, so memory is the largest unit, the
adapter and the activations between two units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import Embedding as LoraEmbedding
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune_trainer.verify.cooperative_threads import CooperativeThreads
from finetune_trainer.verify.head_in_blocks import HeadInBlocks, blocked_head, inner, stored_bytes
from finetune_trainer.verify.skeleton import HOST, ParameterSlot, SkeletonModel, WeightSource, offload
from finetune_trainer.weights.errors import MergeError

MAX_BATCH_POSITIONS = 512
"""Positions of prompts that go through a model together, as many as one long prompt may have: a batch's logits are in memory at
once. Products rearrange all weights for each batch, so few large ones take less time.
"""
ALIGNED_BYTES = 64


class NotStreamableError(Exception):
    """The model uses weights elsewhere than in the module that owns them."""


class UnverifiableModelError(MergeError):
    """The model's class allows no verification in bounded memory; the merge need not be wrong."""


@dataclass(frozen=True)
class LoadUnit:
    """Weights that are loaded at a time: parameters by their paths; of embeddings only needed rows, of a head a block of rows."""

    paths: tuple[str, ...]
    needs_rows: bool = False
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Prompt:
    """Token ids of one forward pass. decoder_ids: for encoder-decoders, the decoder's input, whose logits are compared."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] | None = None

    @property
    def num_positions(self) -> int:
        return len(self.decoder_ids or self.ids)


def batches(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Prompts that go through a model together, by their places in `prompts`, the longest of each batch first.

    The shorter ones of a batch are padded behind their ends, which earlier positions of a decoder do not see; and all compared
    models get the same. Padding never exceeds the prompts themselves. An encoder sees all of its input, so batches of
    encoder-decoders have prompts of one length only.
    """
    batches_so_far: list[list[int]] = []
    for number in sorted(range(len(prompts)), key=lambda number: -prompts[number].num_positions):
        prompt, batch = prompts[number], batches_so_far[-1] if batches_so_far else []
        longest = prompts[batch[0]].num_positions if batch else 0
        shortest_allowed = longest if prompt.decoder_ids is not None else longest / 2
        if batch and (len(batch) + 1) * longest <= MAX_BATCH_POSITIONS and prompt.num_positions >= shortest_allowed:
            batch.append(number)
        else:
            batches_so_far.append([number])
    return batches_so_far


class StreamedModels:
    """Models over the same weights, for instance with an adapter and without."""

    def __init__(
        self, weights: WeightSource, models: Mapping[str, SkeletonModel], scratch: Path, *, by_layer: bool = False
    ) -> None:
        """scratch: a directory for a large head's blocks of logits. by_layer: use the larger units."""
        self._weights, self._models, self._scratch, self._by_layer = weights, models, scratch, by_layer
        self._slots: dict[LoadUnit, list[ParameterSlot]] = {}
        self._ids: frozenset[int] = frozenset()
        self._heads: dict[str, ParameterSlot] = {}
        self._block = self._memory = torch.empty(0, dtype=torch.uint8)
        self._threads: CooperativeThreads[LoadUnit] = CooperativeThreads(self._load, self._release)
        for model in models.values():
            self._attach(model)

    def logits(self, prompts: Sequence[Prompt], directory: Path) -> dict[str, list[Path]]:
        """Run all prompts through all models.

        Returns each model's files in `directory`, one per prompt: (positions, vocabulary) in the model's dtype, row after row.
        Raises NotStreamableError, MergeError.
        """
        self.expect(token for prompt in prompts for token in (*prompt.ids, *(prompt.decoder_ids or ())))
        files = {label: [directory / f"{label}-{number}" for number in range(len(prompts))] for label in self._models}
        self.run(
            [
                [
                    partial(self._write, skeleton, [prompts[place] for place in batch], [files[label][place] for place in batch])
                    for batch in batches(prompts)
                ]
                for label, skeleton in self._models.items()
            ]
        )
        return files

    def expect(self, tokens: Iterable[int]) -> None:
        """Set the tokens that all functions together look up next."""
        self._ids = frozenset(tokens)

    def run(self, groups: Sequence[Sequence[Callable[[], None]]]) -> None:
        """Run functions that call the models, those of one model in one group (cooperative_threads.py).

        Weights are loaded and released as they need them. Raises what they raise.
        """
        self._threads.run(groups)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _write(self, skeleton: SkeletonModel, prompts: Sequence[Prompt], files: Sequence[Path]) -> None:
        logits_of_prompts = logits_of(skeleton.model, prompts, skeleton.dtype, skeleton.device)
        for logits, path in zip(logits_of_prompts, files, strict=True):
            write_logits(complete(logits), path)

    def _attach(self, skeleton: SkeletonModel) -> None:
        by_module: dict[int, list[ParameterSlot]] = {}
        for slot in skeleton.slots:
            by_module.setdefault(id(slot.module), []).append(slot)
        head = blocked_head(skeleton, by_module)
        if head is not None:
            of_head = {slot.name: slot for slot in by_module.pop(id(head))}
            stored = of_head.get("bias")
            bias = head.bias if stored is None else self._weights.whole(stored.path, stored.dtype).to(stored.device)
            weight = self._heads[of_head["weight"].path] = of_head["weight"]
            in_blocks = HeadInBlocks(head, weight, bias, partial(self._head_block, weight.path), self._scratch)
            head.forward = in_blocks.forward  # type: ignore[method-assign, assignment]
        for module, slots in _units(skeleton.model, by_module, _layers(skeleton.model) if self._by_layer else frozenset()):
            unit = LoadUnit(tuple(slot.path for slot in slots))
            if (
                skeleton.looked_up.issuperset(unit.paths)
                and _looks_rows_up(module)
                and self._weights.is_one_tensor(unit.paths[0])
            ):
                unit = LoadUnit(unit.paths, needs_rows=True)
                inner(module).register_forward_pre_hook(self._check_ids)
            self._slots.setdefault(unit, []).extend(slots)
            module.register_forward_pre_hook(lambda _module, _arguments, unit=unit: self._threads.enter(unit))

    def _check_ids(self, _module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if not arguments or not set(torch.unique(arguments[0]).tolist()) <= self._ids:
            raise NotStreamableError("the model looks up embeddings of other tokens than the prompts hold")

    def _load(self, unit: LoadUnit) -> None:
        if unit.block is not None:
            self._memory = torch.empty(0, dtype=torch.uint8)
            head = self._heads[unit.paths[0]]
            self._block = self._weights.rows(head.path, *unit.block, head.dtype).to(head.device)
            return
        values: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        slots = self._slots[unit]
        places = self._places(slots)
        for slot in slots:
            key = slot.path, slot.dtype
            if key not in values:
                values[key] = (
                    self._weights.some_rows(slot.path, self._ids, slot.dtype)
                    if unit.needs_rows
                    else self._weights.whole(slot.path, slot.dtype, places.get(key))
                )
            held = values[key].to(slot.device)
            slot.module._parameters[slot.name] = nn.Parameter(held, requires_grad=False)  # noqa: SLF001

    def _places(self, slots: Sequence[ParameterSlot]) -> dict[tuple[str, torch.dtype], torch.Tensor]:
        """Memory for the weights of linear layers; each unit reuses the last one's, since new pages cost as much as reading.

        Weights of other modules are excluded, since these may return views of them.
        """
        sizes = {
            (slot.path, slot.dtype): (slot.module.get_parameter(slot.name).shape, slot.dtype)
            for slot in slots
            if type(slot.module) in (nn.Linear, Conv1D)
        }
        ends = list(
            accumulate(-(-shape.numel() * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES for shape, dtype in sizes.values())
        )
        if ends and ends[-1] > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        return {
            key: self._memory[first : first + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for (key, (shape, dtype)), first in zip(sizes.items(), [0, *ends], strict=False)
        }

    def _release(self, unit: LoadUnit) -> None:
        self._block = torch.empty(0)
        for slot in self._slots.get(unit, ()):
            offload(slot)

    def _head_block(self, path: str, first: int, last: int) -> torch.Tensor:
        """Rows of an output head, once they are loaded; they are valid only until the next `enter`."""
        self._threads.enter(LoadUnit((path,), block=(first, last)))
        return self._block


def complete(logits: torch.Tensor) -> torch.Tensor:
    """The logits, if all weights were loaded when they were used. Raises NotStreamableError."""
    if logits.isnan().any():
        raise NotStreamableError("weights are used outside of the module that owns them, or a weight is NaN")
    return logits


def write_logits(logits: torch.Tensor, path: Path) -> None:
    """Write logits row after row, in their own dtype."""
    path.write_bytes(stored_bytes(logits))


def logits_of(model: nn.Module, prompts: Sequence[Prompt], dtype: torch.dtype, device: torch.device = HOST) -> list[torch.Tensor]:
    """Logits of each prompt (positions, vocabulary), on the CPU.

    dtype: the model's, in which they were computed; some models return them as float32. device: the model's.
    """
    given = {"input_ids": _filled_up([prompt.ids for prompt in prompts])}
    of_decoder = [prompt.decoder_ids for prompt in prompts if prompt.decoder_ids is not None]
    if of_decoder:
        given["decoder_input_ids"] = _filled_up(of_decoder)
    with torch.inference_mode():
        logits: torch.Tensor = model(**{name: ids.to(device) for name, ids in given.items()}, use_cache=False).logits.to(HOST)
        return [of_prompt[: prompt.num_positions].to(dtype) for of_prompt, prompt in zip(logits, prompts, strict=True)]


def _filled_up(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """(rows, longest row), each row with its last token repeated."""
    length = max(len(row) for row in rows)
    return torch.tensor([[*row, *([row[-1]] * (length - len(row)))] for row in rows])


def _layers(model: nn.Module) -> frozenset[int]:
    """Ids of modules that are members of module lists."""
    return frozenset(id(layer) for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module)


def _units(
    module: nn.Module, by_module: Mapping[int, list[ParameterSlot]], layers: frozenset[int]
) -> Iterator[tuple[nn.Module, list[ParameterSlot]]]:
    if id(module) in by_module or id(module) in layers or isinstance(module, BaseTunerLayer | TrainableTokensWrapper):
        within = {id(part): part for part in module.modules()}
        slots = [slot for key in within for slot in by_module.get(key, ())]
        if slots:
            yield module, slots
        return
    for child in {id(child): child for child in module.children()}.values():
        yield from _units(child, by_module, layers)


def _looks_rows_up(unit: nn.Module) -> bool:
    """Whether only rows of an embedding are used. DoRA takes norms over all of it, trained tokens go into a copy of it."""
    if type(unit) is not LoraEmbedding:
        return isinstance(unit, nn.Embedding)
    layer: Any = unit
    return not any(layer.use_dora.values())
