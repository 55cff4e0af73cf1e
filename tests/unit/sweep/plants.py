"""Faults in the trainer that end in no error: what the oracle of the sweep must notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from finetune_trainer.checkpoint import checkpoints
from finetune_trainer.context import RunContext
from finetune_trainer.roles import merge as merge_role
from finetune_trainer.train import export
from finetune_trainer.train import step as one_step


def wrong_gradient() -> AbstractContextManager[object]:
    """One gradient is a thousandth too large."""
    return _scaled_gradient(1.001)


def half_gradient() -> AbstractContextManager[object]:
    """One gradient is divided by the ranks once more."""
    return _scaled_gradient(0.5)


def _scaled_gradient(factor: float) -> AbstractContextManager[object]:
    original = one_step.local_gradients

    def scaled(model: Any) -> list[torch.Tensor]:
        gradients = original(model)
        if gradients:
            gradients[-1].mul_(factor)
        return gradients

    return patch("finetune_trainer.train.step.local_gradients", scaled)


@contextmanager
def other_experts() -> Iterator[None]:
    """The first token of each batch goes to the two experts that its router likes least."""
    original = torch.topk

    def chosen(scores: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        turned = scores.clone()
        turned[0] = -scores[0]
        indices = original(turned, *arguments, **named).indices
        return scores.gather(-1, indices), indices

    with patch("torch.topk", chosen):
        yield


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

    with patch("finetune_trainer.roles.merge.merge", scaled):
        yield
