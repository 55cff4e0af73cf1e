"""Faults in the trainer that end in no error: what the oracle of the sweep must notice."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from finetune_trainer.checkpoint import checkpoints
from finetune_trainer.context import RunContext
from finetune_trainer.model import base_with_tokens
from finetune_trainer.roles import merge as merge_role
from finetune_trainer.train import export
from finetune_trainer.train import run as training_run
from finetune_trainer.train import step as one_step

PADDING = 256
"""The sweep's data is padded with it, and has it nowhere else."""


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


def late_rates() -> AbstractContextManager[object]:
    """Each step has the rate of the next one."""
    original = training_run.learning_rate
    return patch(
        "finetune_trainer.train.run.learning_rate",
        lambda step, total, training: original(min(step + 1, total - 1), total, training),
    )


def forgotten_row() -> AbstractContextManager[object]:
    """The last added token begins as what the row to spare held."""
    original = base_with_tokens.write_with_rows

    def written(*arguments: Any, added: list[int], **named: Any) -> None:
        original(*arguments, added=added[:-1], **named)

    return patch("finetune_trainer.model.base_with_tokens.write_with_rows", written)


@contextmanager
def swapped_rows() -> Iterator[None]:
    """The merged model has the rows of two added tokens in each other's place."""
    original = merge_role.merge

    def swapped(context: RunContext) -> Any:
        report = original(context)
        (path,) = context.output.merged.glob("*.safetensors")
        tensors = load_file(path)
        name = "model.embed_tokens.weight"
        tensors[name][[PADDING + 1, PADDING + 2]] = tensors[name][[PADDING + 2, PADDING + 1]]
        save_file(tensors, path, metadata={"format": "pt"})
        return report

    with patch("finetune_trainer.roles.merge.merge", swapped):
        yield


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
