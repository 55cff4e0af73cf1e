"""Faults in the trainer that end in no error: what the oracle of the sweep must notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from finetune_trainer import merge_role
from finetune_trainer.checkpoint import checkpoints
from finetune_trainer.context import RunContext
from finetune_trainer.train import export
from finetune_trainer.train import step as one_step


def wrong_gradient() -> AbstractContextManager[object]:
    """One gradient is a thousandth too large."""
    original = one_step.local_gradients

    def scaled(model: Any) -> list[torch.Tensor]:
        gradients = original(model)
        if gradients:
            gradients[-1].mul_(1.001)
        return gradients

    return patch("finetune_trainer.train.step.local_gradients", scaled)


def zeroed_adapter() -> AbstractContextManager[object]:
    """The file has zeros for what was trained last."""
    original = export.full_parameters

    def emptied(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in original(*arguments):
            yield name, torch.zeros_like(tensor) if "lora_B" in name else tensor

    return patch("finetune_trainer.train.export.full_parameters", emptied)


def lost_optimizer_state() -> AbstractContextManager[object]:
    """A resumed run begins with empty moments."""
    original = checkpoints.load

    def forgetful(directory: Path, manifest: Any, found: Any, optimizer: torch.optim.Optimizer) -> None:
        original(directory, manifest, found, optimizer)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    return patch("finetune_trainer.checkpoint.checkpoints.load", forgetful)


@contextmanager
def wrong_scaling() -> Iterator[None]:
    """The merged model has the update one and a half times, behind the back of the merge's own verification."""
    original = merge_role.merge

    def scaled(context: RunContext) -> Any:
        report = original(context)
        base: Mapping[str, torch.Tensor] = load_file(context.base_model / "model.safetensors")
        (path,) = context.output.merged.glob("*.safetensors")
        tensors = {name: base[name] + 1.5 * (tensor - base[name]) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        return report

    with patch("finetune_trainer.merge_role.merge", scaled):
        yield
