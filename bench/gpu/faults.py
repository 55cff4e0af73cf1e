"""What happens to ranks in tiers of `make gpu-check`; each is sent to a rank's process and armed there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.model import compilation, variable_length
from tests.support.forked_ranks import wrap


@dataclass(frozen=True)
class Hungry:
    """In the second step, more memory is asked for than any device has."""

    def arm(self, _rank: int) -> None:
        calls: list[object] = []

        def asking(original: Callable[..., torch.Tensor], gradients: Any, device: torch.device) -> torch.Tensor:
            calls.append(None)
            if len(calls) == 2:
                torch.empty(1 << 50, device=device)
            return original(gradients, device)

        wrap("train.step:squared_norm", asking)


@dataclass(frozen=True)
class Silent:
    """The last rank waits forever in its third step."""

    ranks: int

    def arm(self, rank: int) -> None:
        calls: list[object] = []

        def waiting(original: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
            calls.append(None)
            if len(calls) == 3:
                threading.Event().wait()
            return original(*arguments)

        if rank == self.ranks - 1:
            wrap("train.step:squared_norm", waiting)


@dataclass(frozen=True)
class WithoutCompiler:
    """A rank finds no compiler, and nothing that was compiled before but `launcher`."""

    launcher: Path
    cache: Path

    def arm(self, _rank: int) -> None:
        os.environ |= {"PATH": "/nowhere", "TRITON_CACHE_DIR": str(self.cache)}
        compilation.LAUNCHER = self.launcher


@dataclass(frozen=True)
class TracedAlone:
    """Layers are traced and not compiled: what of it a CPU can show without a compiler and its minutes. What stands for the
    kernel of attention is not even traced, because it looks at bounds, which are others in each batch.
    """

    def arm(self, _rank: int) -> None:
        variable_length.by_document = torch.compiler.disable(variable_length.by_document)
        original = torch.nn.Module.compile
        torch.nn.Module.compile = lambda layer: original(layer, backend="aot_eager")  # type: ignore[method-assign,misc]
