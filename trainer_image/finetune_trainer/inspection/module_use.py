"""Observes how a model uses each module, in one forward and backward pass of a small model of the same architecture.

An adapter works only if its module is called. But some models read a module's weight instead of calling it, or pass the weight to
a fused kernel, and some modules do not affect the loss. No list of architectures could cover this.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.model.load import load_config
from finetune_trainer.small_models.layers import KeptLayers
from finetune_trainer.small_models.search import NoSmallModelError, find_small_model, special_tokens
from finetune_trainer.small_models.shrink import SmallConfig, with_low_thresholds, without_dropout

log = logging.getLogger(__name__)
ROWS, LENGTH = 8, 16
"""Size of the batch: enough tokens for a router of any width to use each expert, but few enough for code that loops over them."""
_UNTRACKED = "bias"
"""Name of parameters that adapters and quantization do not change, so it does not matter which modules read them."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Matches a part of a name that is a number, such as that of a layer or an expert."""


@dataclass(frozen=True)
class ModuleUse:
    """The use of one module, or of several similar modules, such as the experts of a layer."""

    is_called: bool
    gets_gradient: bool
    """Whether one of the module's own parameters gets a gradient; also True if it has no parameters."""
    readers: tuple[str, ...] = ()
    """Classes of the modules whose code reads the module's weight outside its forward pass."""
    gives_tensor: bool = True
    """Whether the module returned a single tensor each time it was called."""
    is_handed_to: tuple[str, ...] = ()
    """Fused kernels (`package.function`), of packages that are installed here, that would get the module's weight."""

    @property
    def is_bypassed(self) -> bool:
        """Whether something other than the module computes with its weight."""
        return bool(self.readers or self.is_handed_to)


class ModuleUses:
    """The observed uses of the small model's modules."""

    def __init__(self, observed: Mapping[str, ModuleUse], layers: KeptLayers | None) -> None:
        self._layers = layers
        by_layer: dict[str, list[ModuleUse]] = defaultdict(list)
        anywhere: dict[str, list[ModuleUse]] = defaultdict(list)
        for name, use in observed.items():
            by_layer[_without_inner_numbers(name)].append(use)
            anywhere[_without_numbers(name)].append(use)
        self._by_layer = {name: _combined(uses) for name, uses in by_layer.items()}
        self._anywhere = {name: _combined(uses) for name, uses in anywhere.items()}

    def of(self, name: str) -> ModuleUse | None:
        """Return the use of a module, given its name in the full model; None if the small model has no such module."""

        def kept(layer: re.Match[str]) -> str:
            number = self._layers.kept_layer_of(int(layer[0])) if self._layers is not None else None
            return layer[0] if number is None else str(number)

        renumbered = _NUMBER.sub(kept, name, count=1)
        return self._by_layer.get(_without_inner_numbers(renumbered)) or self._anywhere.get(_without_numbers(name))


def _without_inner_numbers(name: str) -> str:
    """Replace numbers after the layer's by `*`: the experts of a layer work alike, and differ only in the tokens they get."""
    layer = _NUMBER.search(name)
    return name if layer is None else name[: layer.end()] + _NUMBER.sub("*", name[layer.end() :])


def _without_numbers(name: str) -> str:
    return _NUMBER.sub("*", name)


def _combined(uses: list[ModuleUse]) -> ModuleUse:
    return ModuleUse(
        is_called=any(use.is_called for use in uses),
        gets_gradient=any(use.gets_gradient for use in uses),
        gives_tensor=all(use.gives_tensor for use in uses),
        readers=tuple(sorted({reader for use in uses for reader in use.readers})),
        is_handed_to=tuple(sorted({kernel for use in uses for kernel in use.is_handed_to})),
    )


@dataclass(frozen=True)
class ObservedUse:
    """A small model and the observed use of its modules."""

    model: PreTrainedModel
    """The model with random float32 weights and no dropout. Thresholds on positions are low, so its short rows exceed them."""
    uses: ModuleUses


def observe_use(plan: RunPlan, directory: Path) -> ObservedUse | None:
    """Observe a small model. Returns None if it cannot be built or run, which the rehearsal reports."""
    try:
        config = load_config(plan, directory)
        with _torch_only(config) as kernel_parameters:
            described = without_dropout(config.to_dict())
            try:
                low = with_low_thresholds(described, plan.data.max_sequence_length)
                shrunken, model = find_small_model(plan, config, low)
            except NoSmallModelError:
                shrunken, model = find_small_model(plan, config, described)
            kernel_parameters.clear()
            if plan.method.quantization is not None:
                _mark_as_quantized(model)
            uses = ModuleUses(_observed(model, _tokens(shrunken), kernel_parameters), shrunken.layers)
    except Exception as error:  # noqa: BLE001 - code of any model
        log.warning("checks that need to run the model are skipped: %s: %s", type(error).__name__, error)
        return None
    model.zero_grad()
    return ObservedUse(model, uses)


def _tokens(shrunken: SmallConfig) -> torch.Tensor:
    """Return token ids of shape (ROWS, LENGTH), without special tokens."""
    allowed = torch.tensor(sorted(set(range(shrunken.tokens.size)) - special_tokens(shrunken.config)))
    return allowed[torch.arange(ROWS * LENGTH) % len(allowed)].view(ROWS, LENGTH)


def _observed(model: PreTrainedModel, tokens: torch.Tensor, kernel_parameters: Sequence[tuple[int, str]]) -> dict[str, ModuleUse]:
    model.train()
    modules = dict(model.named_modules())
    owners: dict[int, dict[str, str]] = defaultdict(dict)
    for name, module in modules.items():
        for last, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)][name] = last
    calls = _Calls(modules)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    with calls, (reads := _Reads(owners, calls.inside)):
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.autograd.backward(logits.float().square().mean())
    kernels: dict[str, set[str]] = defaultdict(set)
    for parameter, function in kernel_parameters:
        for name, last in owners.get(parameter, {}).items():
            if last != _UNTRACKED:
                kernels[name].add(function)
    uses = {}
    for name, module in modules.items():
        own = list(module.parameters(recurse=False))
        uses[name] = ModuleUse(
            is_called=name in calls.called,
            gets_gradient=not own or any(parameter.grad is not None for parameter in own),
            readers=tuple(sorted({type(modules[reader]).__name__ for reader in reads.past_forward[name]})),
            gives_tensor=name not in calls.gave_several,
            is_handed_to=tuple(sorted(kernels[name])),
        )
    return uses


class _Calls:
    """Records which modules are called, in whatever way, and keeps track of which modules are currently computing."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self.called: set[str] = set()
        self.gave_several: set[str] = set()
        """Names of modules that returned something other than a single tensor."""
        self.inside: list[str] = []
        """Names of the modules whose forward pass has begun but not ended, the innermost last."""

    def __enter__(self) -> None:
        for name, module in self._modules.items():
            # The instance's attribute also catches code that calls `forward` directly, which bypasses torch's hooks.
            module.forward = self._recorded(name, module.forward)

    def __exit__(self, *_: object) -> None:
        for module in self._modules.values():
            del module.forward

    def _recorded(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            self.inside.append(name)
            try:
                result = forward(*args, **kwargs)
            finally:
                self.inside.pop()
            if not isinstance(result, torch.Tensor):
                self.gave_several.add(name)
            return result

        return recorded


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations that use a parameter outside the forward pass of the module that owns the parameter."""

    def __init__(self, owners: Mapping[int, Mapping[str, str]], inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners, self._inside = owners, inside
        self.past_forward: dict[str, set[str]] = defaultdict(set)
        """Name of the module that owns the parameter -> names of the modules that read it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            owners = self._owners.get(id(value)) if isinstance(value, torch.Tensor) else None
            # A tied parameter belongs to several modules. While any of them computes, reads are fine; others count for all.
            if owners is not None and not any(name in owners for name in self._inside):
                for name, last in owners.items():
                    if last != _UNTRACKED:
                        self.past_forward[name].add(self._inside[-1] if self._inside else "")
        return func(*args, **(kwargs or {}))


@contextmanager
def _torch_only(config: PreTrainedConfig) -> Iterator[list[tuple[int, str]]]:
    """Let the architecture compute with torch alone, without fused kernels. Yields a list that is filled with the id of each
    parameter that would be passed to a kernel, and the kernel's name.

    transformers replaces a function by such a kernel, which needs a GPU, if its package is installed (mamba-ssm, causal-conv1d,
    flash-linear-attention: transformers.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback).
    """
    kernel_parameters: list[tuple[int, str]] = []
    mapped = AutoModelForCausalLM._model_mapping.get(type(config), None)  # noqa: SLF001 - there is no public name
    classes = mapped if isinstance(mapped, list | tuple) else (mapped,)
    spaces = {model.__module__: vars(sys.modules[model.__module__]) for model in classes if model is not None}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for space in spaces.values():
        for name, function in list(space.items()):
            is_wrapper = inspect.isfunction(function) and hasattr(function, "__wrapped__")
            package = inspect.getclosurevars(function).nonlocals.get("package") if is_wrapper else None
            if isinstance(package, str):
                replaced.append((space, name, function))
                kernel = f"{package}.{name}" if find_spec(package) else ""
                space[name] = _recording(kernel_parameters, function.__wrapped__, kernel)
    try:
        yield kernel_parameters
    finally:
        for space, name, function in replaced:
            space[name] = function


def _recording(kernel_parameters: list[tuple[int, str]], function: Callable[..., Any], kernel: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if kernel:
            parameters = (value for value in (*args, *kwargs.values()) if isinstance(value, nn.Parameter))
            kernel_parameters.extend((id(parameter), kernel) for parameter in parameters)
        return function(*args, **kwargs)

    return recorded


def _mark_as_quantized(model: PreTrainedModel) -> None:
    """Mark modules as transformers' quantizers do: some code calls layers only if quantized, and otherwise reads the weights."""
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._is_quantized = True  # noqa: SLF001 - see transformers.quantizers.base
