"""An output layer that returns the loss of a forward pass instead of its logits.

The layer keeps its module, name, parameters and place in the model. Only its `forward` is replaced, so FSDP's hooks gather its
parameters as usual, and checkpoints, adapters and exports are not affected. The caller of the model sets the targets for the
duration of the call; without targets the layer returns logits.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel

from finetune_trainer.objective.cross_entropy import Targets, cross_entropy_of, cross_entropy_of_linear

log = logging.getLogger(__name__)


@dataclass
class Scoring:
    """One forward pass that should return a loss instead of logits."""

    targets: Targets
    loss: torch.Tensor | None = None
    """The loss, set by the output layer; None if the layer's `forward` was not replaced, so the output is logits."""


_scoring: ContextVar[Scoring | None] = ContextVar("scoring", default=None)


@contextmanager
def scored(targets: Targets) -> Iterator[Scoring]:
    """Let the output layer score `targets` in the body, which calls the model once."""
    scoring = Scoring(targets)
    token = _scoring.set(scoring)
    try:
        yield scoring
    finally:
        _scoring.reset(token)


def install(model: nn.Module) -> None:
    """Replace the `forward` of the model's output layer if the model returns that layer's output unchanged.

    Models that scale or cap their logits afterwards are left unchanged. Call this before sharding.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel):
        return
    head = base.get_output_embeddings()
    while isinstance(head, ModulesToSaveWrapper):
        # The wrapper returns the output of the trained copy, and FSDP may make the copy a separate unit.
        head = head.modules_to_save[head.active_adapters[0]]
    if isinstance(head, nn.Module) and returns_output_of_head(base):
        head.forward = _ScoringForward(head, head.forward)
    else:
        log.info("%s changes the output of its output layer, so all logits are kept", type(base).__name__)


class _ScoringForward:
    def __init__(self, head: nn.Module, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._head, self._logits = head, logits

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        scoring = _scoring.get()
        if scoring is None:
            return self._logits(hidden)
        scoring.loss = self._loss(hidden, scoring.targets)
        return scoring.loss

    def _loss(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        head: Any = self._head
        # Not isinstance, since a subclass may compute something else. FSDP 2 derives a new class for each module.
        if nn.Linear in (type(head), type(head).__bases__[-1]):
            kind = hidden.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
            return cross_entropy_of_linear(hidden, head.weight, head.bias, targets, dtype)
        rows = hidden.flatten(0, -2).index_select(0, targets.rows)
        if any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in head.modules() if part is not head):
            # FSDP gathers the units inside the layer each time they are called, so they are called only once.
            return cross_entropy_of(self._logits(rows), _unchanged, targets)
        return cross_entropy_of(rows, self._logits, targets)


class _BodyOutput:
    """Stands in for a body's output: holds hidden states, and None for everything else that a body may return."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]


def _unchanged(logits: torch.Tensor) -> torch.Tensor:
    return logits


def returns_output_of_head(model: PreTrainedModel) -> bool:
    """Whether the model's `logits` are the tensor that its output layer returned, with that layer called only once.

    This is tested with a copy on the meta device that skips the body: no value is computed, and `model` is not changed.
    """
    returned: list[torch.Tensor] = []

    def remember(_hidden: torch.Tensor) -> torch.Tensor:
        returned.append(torch.zeros((), device="meta"))
        return returned[-1]

    config = copy.deepcopy(model.config)
    hidden_size = config.get_text_config().hidden_size
    try:
        with torch.device("meta"):
            skeleton = type(model)(config)
            body, head = skeleton.base_model, skeleton.get_output_embeddings()
            if head is None or body is skeleton:
                return False
            body.forward = lambda *_, **__: _BodyOutput(torch.zeros(1, 8, hidden_size))
            head.forward = remember
            logits = skeleton(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False).logits
    except Exception as error:  # noqa: BLE001 - code of any model, even remote code; whole logits always work
        log.info("it is unknown whether %s changes its logits, so all are kept: %s", type(model).__name__, error)
        return False
    return len(returned) == 1 and logits is returned[0]
