"""Activation checkpointing per layer: backward recomputes either all activations of a layer or only the cheap ones.

In the second case, results of expensive operations are kept from the forward pass. torch's own implementation
(torch.utils.checkpoint.create_selective_checkpoint_contexts, 2.15) also keeps results whose memory is overwritten later; ours
copies such results first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from finetune_job.api.training import ActivationCheckpointing

_KEPT_NAMES = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "_scaled_mm",
    "_scaled_mm_v2",
    "linear",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
KEPT_OPERATIONS = frozenset(
    overload
    for name in _KEPT_NAMES
    if (packet := getattr(torch.ops.aten, name, None)) is not None
    for overload in (getattr(packet, name) for name in packet.overloads())
    if not overload._schema.is_mutable  # noqa: SLF001 - there is no public name
)
"""Expensive operations, whose results are kept: matrix products and attention, in every form in which torch dispatches them."""
_KEPT_BY_NAME = frozenset({"torch_attn._varlen_attn.default", "bitsandbytes.gemm_4bit.default"})
"""More kept operations, which exist only after their modules are imported: varlen attention, products with packed weights."""

Operation = OpOverload | HigherOrderOperator


def checkpoint_activations(model: PreTrainedModel, kind: ActivationCheckpointing) -> None:
    """Make each layer keep no activations, or only results of products and attention. Call this after PEFT, before sharding."""
    if kind is ActivationCheckpointing.NONE:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind is ActivationCheckpointing.SELECTIVE:
        options["context_fn"] = selective_checkpoint_contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # The call above makes transformers request gradients of the embeddings' output, which this undoes. Only reentrant checkpoints
    # need these gradients; here the first layer would compute products that are never used.
    model.disable_input_require_grads()


def selective_checkpoint_contexts() -> tuple[RecordResults, ReuseResults]:
    """Return the contexts of a checkpoint's two passes, as torch requires of `context_fn`."""
    kept: deque[KeptResult] = deque()
    return RecordResults(kept), ReuseResults(kept)


@dataclass
class KeptResult:
    """The result of an operation in the first pass."""

    operation: Operation
    result: Any


class RecordResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode for the first pass, which keeps results. A kept result is copied before its memory is overwritten."""

    supports_higher_order_operators = True
    """Whether torch passes higher-order operators to this mode; they run unchanged."""

    def __init__(self, kept: deque[KeptResult]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self._in_memory: dict[int, KeptResult] = {}
        """Memory -> the kept result that is stored there, until the memory is overwritten."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            self._copy(_memory(tensor))
        result = func(*args, **kwargs)
        if is_kept(func, args, kwargs):
            # Autograd makes the returned tensor part of its graph, so a detached one is kept.
            kept = KeptResult(func, tree_map_only(torch.Tensor, torch.Tensor.detach, result))
            self.kept.append(kept)
            for tensor in tree_leaves(kept.result):
                if isinstance(tensor, torch.Tensor):
                    self._in_memory[_memory(tensor)] = kept
        return result

    def _copy(self, memory: int) -> None:
        kept = self._in_memory.pop(memory, None)
        if kept is not None:
            kept.result = tree_map_only(
                torch.Tensor, lambda tensor: tensor.clone() if _memory(tensor) == memory else tensor, kept.result
            )


class ReuseResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode for the second pass, in which kept results replace operations. Each result is used once and then dropped."""

    supports_higher_order_operators = True

    def __init__(self, kept: deque[KeptResult]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._is_used = False

    def __enter__(self) -> ReuseResults:
        if self._is_used:
            raise RuntimeError("kept results serve one backward pass; the second needs another forward pass")
        self._is_used = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        kept = self._kept.popleft() if self._kept else None
        if kept is None or kept.operation is not func:
            first = "none" if kept is None else str(kept.operation)
            raise RuntimeError(
                f"recomputed in backward, a layer of the model called {func} where its first pass called {first}: the two passes "
                "do not compute the same; set spec.training.activationCheckpointing: None"
            )
        return kept.result


def _memory(tensor: torch.Tensor) -> int:
    """Identify the memory that a tensor shares with its views. The number is unique while that memory exists."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - there is no public name


def is_kept(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the result is kept. Attention with dropout is recomputed: skipping it would shift all later random numbers."""
    is_expensive = func in KEPT_OPERATIONS or str(func) in _KEPT_BY_NAME
    return is_expensive and not any(_given(func, _dropout_arguments(func), args, kwargs))


def written_tensors(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that the operation writes to."""
    positions = _written_arguments(func)
    if positions:
        for value in _given(func, positions, args, kwargs):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _given(func: Operation, positions: tuple[int, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of these arguments, except those left at their defaults."""
    arguments = _arguments(func)
    for position in positions:
        name = arguments[position].name
        if name in kwargs:
            yield kwargs[name]
        elif position < len(args):
            yield args[position]


@cache
def _written_arguments(func: Operation) -> tuple[int, ...]:
    aliases = enumerate(argument.alias_info for argument in _arguments(func))
    return tuple(position for position, alias in aliases if alias is not None and alias.is_write)


@cache
def _dropout_arguments(func: Operation) -> tuple[int, ...]:
    return tuple(position for position, argument in enumerate(_arguments(func)) if argument.name == "dropout_p")


def _arguments(func: Operation) -> list[Any]:
    """Return the arguments that the operation's schema declares; a higher-order operator has no schema."""
    return list(func._schema.arguments) if isinstance(func, OpOverload) else []  # noqa: SLF001 - there is no public name
