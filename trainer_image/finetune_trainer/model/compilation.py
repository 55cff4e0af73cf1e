"""torch.compile of each transformer layer, in place, so that parameters keep their names."""

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
"""What inductor calls on a device of this type: a C++ compiler for its CPU kernels, a C compiler for Triton's launcher."""
LAUNCHER = Path("/opt/finetune/launcher")
"""Where the image has that launcher compiled (trainer_image/layers/build-launcher.sh)."""


def compile_layers(model: nn.Module, fsdp: FsdpPlan) -> int:
    """Compile each layer of the classes that FSDP would wrap, at its first call; how many there are. Raises ConfigError."""
    wanted = set(layer_classes(model, fsdp.transformer_layer_cls_to_wrap))
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    if torch.are_deterministic_algorithms_enabled():
        from torch._inductor import config

        # The compiler would else choose between kernels by measuring them, and sums in one order in this attempt and in another
        # in the next.
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
    """Bounds of documents that call for no new code in the next batch: of any number, and of few greatest lengths."""
    bounds = {name: kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in kwargs}
    for each in bounds.values():
        torch._dynamo.maybe_mark_dynamic(each, 0)  # noqa: SLF001 - torch.compiler has no name for it
    lengths = {name: kwargs[name] for name in ("max_length_q", "max_length_k") if name in kwargs}
    return args, kwargs | {name: 1 << (length - 1).bit_length() for name, length in lengths.items()}


def missing_compiler(device_type: str) -> tuple[str, ...]:
    """The programs of which one is needed to compile for this type of device; empty where one is installed, or none needed."""
    has_it = _is_installed(device_type) or (device_type == "cuda" and _has_launcher())
    return () if has_it else COMPILERS[device_type]


def _is_installed(device_type: str) -> bool:
    return any(shutil.which(name) for name in COMPILERS[device_type])


def _has_launcher() -> bool:
    return _compiled("cuda_utils").exists()


def _compiled(name: str) -> Path:
    """Where the image would have a module for this Python."""
    return LAUNCHER / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def take_launcher() -> None:
    """Let Triton take its launcher from the image, where it would call a compiler. Everything else it compiles by itself."""
    from triton import knobs

    knobs.build.impl = _of_the_image


def _of_the_image(name: str, *_source: Any) -> str:
    """The path of a compiled module. Raises ConfigError for another one than the launcher."""
    path = _compiled(name)
    if not path.exists():
        raise ConfigError(
            f"spec.training.compile: Triton wants {name} compiled, which the trainer image does not have",
            "set spec.training.compile: false, or use a trainer image with a C compiler",
        )
    return str(path)
