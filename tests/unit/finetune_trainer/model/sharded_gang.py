"""Ranks that build a sharded model of one specification, and the losses and gradients that they find."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune_trainer.model import sharded
from finetune_trainer.ranks.gang import joined
from tests.support.forked_ranks import run_processes
from tests.support.small_gang import Unchanged
from tests.support.tiny_model import plan_of, tiny_spec

TOKENS = torch.arange(60).view(2, 30) * 7 % 256
FULL = {"type": "Full", "lora": None}
LORA_TIED = {"type": "LoRA", "lora": {"r": 4}}
FLAT = {"version": 1, "useOrigParams": True, "peftWrapPolicy": False}


def spec_of(method: dict[str, Any], fsdp: dict[str, Any], ranks: int, **training: Any) -> dict[str, Any]:
    return tiny_spec(
        method=method, parallelism={"processesPerNode": ranks, "fsdp": fsdp}, training={"globalBatchSize": 6, **training}
    )


def gang(body: Any, ranks: int, directory: Path, *arguments: Any) -> None:
    store = f"file://{directory}/store"
    assert run_processes([partial(body, rank, ranks, store, directory, *arguments) for rank in range(ranks)]) == [0] * ranks


def losses_and_gradients(rank: int, ranks: int, store: str, out: Path, spec: dict[str, Any], base: Path) -> None:
    with joined(rank, ranks, rank, store) as joint:
        trained = sharded.build(plan_of(spec), base, joint, Unchanged())
        logits = trained.module(input_ids=TOKENS, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        gradients = {piece.name: _gradient(piece.holder) for piece in trained.pieces if piece.stop > piece.start}
        torch.save((loss.detach(), gradients), out / f"found-{rank}")


def _gradient(holder: nn.Parameter) -> torch.Tensor:
    gradient = holder.grad
    assert gradient is not None
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def computed(
    directory: Path,
    base: Path,
    method: dict[str, Any],
    fsdp: dict[str, Any],
    *,
    body: Callable[..., None] = losses_and_gradients,
    **training: Any,
) -> list[Any]:
    directory.mkdir()
    ranks = 2
    gang(body, ranks, directory, spec_of(method, fsdp, ranks, **training), base)
    return [torch.load(directory / f"found-{rank}") for rank in range(ranks)]
