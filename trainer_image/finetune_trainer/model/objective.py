"""What the training loop needs to know of an objective, and nothing else.

The loss of an optimizer step is a mean over the terms of its global batch: supervised tokens here, pairs of answers in preference
tuning. Each forward pass gives its own terms times one weight, so that any split of the batch over ranks and micro-steps adds up
to the same mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn

Batch_contra = TypeVar("Batch_contra", contravariant=True)
Produced_co = TypeVar("Produced_co", covariant=True)
Read_contra = TypeVar("Read_contra", contravariant=True)


@dataclass(frozen=True)
class BatchSize:
    """How much work a batch is."""

    tokens: int
    """Of documents; padding is computed, but is not work that anybody wanted."""
    squared_document_lengths: int
    """Sum over documents of length squared: what causal attention costs is proportional to it."""


class Split(Protocol[Produced_co]):
    """Prepared sequences, numbered from 0."""

    @property
    def num_sequences(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Produced_co:
        """These sequences, in this order."""
        ...


class Objective(Protocol[Read_contra, Batch_contra]):
    """An objective over batches `Batch_contra` of splits `Read_contra`. It keeps nothing between calls."""

    def install(self, model: nn.Module) -> None:
        """Make the model ready. Called once, between adapters and sharding; parameters keep names and values."""
        ...

    def num_terms(self, data: Read_contra, sequences: Sequence[int]) -> int:
        """Terms of the mean over these sequences together."""
        ...

    def size(self, batch: Batch_contra) -> BatchSize:
        """How much work the batch is."""
        ...

    def weighted_loss(
        self, model: nn.Module, batch: Batch_contra, weight: float, device: torch.device, autocast: torch.dtype | None
    ) -> torch.Tensor:
        """`weight` times the sum of the batch's terms: float32, a scalar on `device`.

        Calls the model exactly once, because gathering sharded parameters takes all ranks. The gradient is that of the returned
        value; `weight` is given beforehand so that it is in the gradient before anything is rounded to 16 bits.
        """
        ...
