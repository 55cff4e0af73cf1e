"""What a rank writes down while the trainer trains: values and gradients around each optimizer step, and losses.

The trainer's own functions run unchanged; only what they return or are about to do is noted.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from finetune_trainer.checkpoint.state import ParameterRange
from finetune_trainer.train import run as training_run
from finetune_trainer.train import step as one_step

Part = tuple[tuple[int, ...], int, torch.Tensor]
"""Global shape, first element, and values of one rank's part of a parameter."""


@dataclass
class Recorded:
    """One rank's notes of one call of the trainer."""

    parameters: list[dict[str, Part]] = field(default_factory=list)
    """Before each optimizer step, and after the last."""
    gradients: list[dict[str, Part]] = field(default_factory=list)
    """As the optimizer gets them, clipped; parameters without one are absent."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    pieces: list[ParameterRange] = field(default_factory=list)
    """Of the model that is trained."""
    quiet_step: int | None = None
    """A step, counted from 0 in this call, in which dropout drops nothing, so that what it comes to can be compared."""

    @property
    def is_quiet(self) -> bool:
        return self.quiet_step == len(self.losses)


_NOTES = [Recorded()]
"""The last one is written."""


def begin(quiet_step: int | None = None) -> Recorded:
    """Notes of what follows in this process."""
    _NOTES[:] = [Recorded(quiet_step=quiet_step)]
    return _NOTES[-1]


def install() -> None:
    """In this process, let the trainer's functions be noted down."""
    _around(training_run, "build_optimizer", after=_optimizer_made)
    _around(one_step, "optimizer_step", before=_before_step, after=_stepped)
    _around(training_run, "held_out_loss", after=lambda loss, *_: _NOTES[-1].held_out.append(loss))
    dropout = functional.dropout

    @functools.wraps(dropout)
    def dropping(values: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        return values if _NOTES[-1].is_quiet else dropout(values, *arguments, **named)

    setattr(functional, dropout.__name__, dropping)


def _around(module: Any, name: str, after: Callable[..., object], before: Callable[[], object] = lambda: None) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def noted(*arguments: Any, **named: Any) -> Any:
        before()
        result = original(*arguments, **named)
        after(result, *arguments)
        return result

    setattr(module, name, noted)


def _before_step() -> None:
    notes = _NOTES[-1]
    if not notes.parameters:
        notes.parameters.append(_values(notes.pieces))


def _stepped(result: one_step.StepResult, *_arguments: object) -> None:
    notes = _NOTES[-1]
    notes.parameters.append(_values(notes.pieces))
    notes.losses.append(result.loss)
    notes.norms.append(result.gradient_norm)


def _optimizer_made(optimizer: torch.optim.Optimizer, pieces: list[ParameterRange], *_arguments: object) -> None:
    notes = _NOTES[-1]
    notes.pieces = pieces
    optimizer.register_step_pre_hook(lambda *_: notes.gradients.append(_gradients(pieces)))


def _values(pieces: list[ParameterRange]) -> dict[str, Part]:
    return {piece.name: (piece.shape, piece.start, piece.parameter_values().clone()) for piece in pieces}


def _gradients(pieces: list[ParameterRange]) -> dict[str, Part]:
    found = {}
    for piece in pieces:
        gradient = piece.holder.grad
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        values = local.reshape(-1)[piece.offset : piece.offset + piece.stop - piece.start].clone()
        found[piece.name] = (piece.shape, piece.start, values)
    return found


def whole(parts: list[dict[str, Part]]) -> dict[str, torch.Tensor]:
    """Every rank's parts put together; elements that no rank has are NaN."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, (shape, start, values) in part.items():
            if name not in found:
                found[name] = torch.full((torch.Size(shape).numel(),), torch.nan, dtype=values.dtype)
            found[name][start : start + values.numel()] = values
    shapes = {name: shape for part in parts for name, (shape, _, _) in part.items()}
    return {name: values.view(shapes[name]) for name, values in found.items()}
