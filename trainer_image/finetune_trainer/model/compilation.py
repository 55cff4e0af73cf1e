"""Compiles each transformer layer in place with torch.compile, so that parameters keep their names."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune_job.plan.run_plan import FsdpPlan
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.wrap_plan import layer_classes

COMPILERS = {"cpu": ("g++", "c++", "clang++"), "cuda": ("gcc", "cc", "clang")}
"""Device type -> compilers, of which inductor needs one: C++ for its CPU kernels, C for Triton's launcher."""
LAUNCHER = Path("/opt/finetune/launcher")
"""Directory in the image that contains Triton's compiled launcher (trainer_image/layers/build-launcher.sh)."""


def compile_layers(model: nn.Module, fsdp: FsdpPlan) -> int:
    """Make each layer of the classes that FSDP would wrap compile on its first call. Return their number. Raises ConfigError."""
    wanted = set(layer_classes(model, fsdp.transformer_layer_cls_to_wrap))
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    if torch.are_deterministic_algorithms_enabled():
        from torch._inductor import config

        # Otherwise the compiler would choose kernels by benchmarking them, and two attempts could sum in different orders.
        config.deterministic = True
    if _has_launcher() and not _is_installed("cuda"):
        take_launcher()
    for layer in layers:
        layer.compile()
    model.register_forward_pre_hook(_with_steady_bounds, with_kwargs=True)
    return len(layers)


def _with_steady_bounds(
    _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Avoid recompiling for each batch: mark the number of document bounds as dynamic, round lengths up to powers of two."""
    bounds = {name: kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in kwargs}
    for tensor in bounds.values():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)  # noqa: SLF001 - torch.compiler has no name for it
    lengths = {name: kwargs[name] for name in ("max_length_q", "max_length_k") if name in kwargs}
    return args, kwargs | {name: 1 << (length - 1).bit_length() for name, length in lengths.items()}


def missing_compiler(device_type: str) -> tuple[str, ...]:
    """Return the compilers that this device type could use; empty if one is installed or none is needed."""
    has_it = _is_installed(device_type) or (device_type == "cuda" and _has_launcher())
    return () if has_it else COMPILERS[device_type]


def _is_installed(device_type: str) -> bool:
    return any(shutil.which(name) for name in COMPILERS[device_type])


def _has_launcher() -> bool:
    return _compiled("cuda_utils").exists()


def _compiled(name: str) -> Path:
    """Return the path that a compiled module for this Python version would have in the image."""
    return LAUNCHER / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def take_launcher() -> None:
    """Make Triton take its launcher from the image instead of calling a C compiler. Triton compiles everything else itself."""
    from triton import knobs

    knobs.build.impl = _of_the_image


def _of_the_image(name: str, *_source: Any) -> str:
    """Return the path of the compiled launcher. Raises ConfigError for any other module."""
    path = _compiled(name)
    if not path.exists():
        raise ConfigError(
            f"spec.training.compile: Triton needs {name} in compiled form, which the trainer image does not have",
            "set spec.training.compile: false, or use a trainer image with a C compiler",
        )
    return str(path)
