"""The interface between the training loop and an objective.

The loss of an optimizer step is a mean over the terms of its global batch: supervised tokens in this product, pairs of answers in
preference tuning. Each forward pass returns the sum of its terms times a common weight, so any split of the batch over ranks and
micro-steps adds up to the same mean.
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
    """The amount of work in a batch."""

    tokens: int
    """Number of tokens in documents. Padding is also computed, but does not count as work."""
    squared_document_lengths: int
    """Sum of the squared lengths of documents, to which the cost of causal attention is proportional."""


class Split(Protocol[Produced_co]):
    """Prepared sequences, numbered from 0."""

    @property
    def num_sequences(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Produced_co:
        """Return a batch of these sequences, in this order."""
        ...


class Objective(Protocol[Read_contra, Batch_contra]):
    """An objective over batches `Batch_contra` of splits `Read_contra`. It keeps no state between calls."""

    def install(self, model: nn.Module) -> None:
        """Prepare the model. Called once, between attaching adapters and sharding. Parameters keep their names and values."""
        ...

    def num_terms(self, data: Read_contra, sequences: Sequence[int]) -> int:
        """Return how many terms of the mean these sequences contribute."""
        ...

    def size(self, batch: Batch_contra) -> BatchSize:
        """Return the amount of work in the batch."""
        ...

    def weighted_loss(
        self, model: nn.Module, batch: Batch_contra, weight: float, device: torch.device, autocast: torch.dtype | None
    ) -> torch.Tensor:
        """Return `weight` times the sum of the batch's terms as a float32 scalar on `device`.

        It must call the model exactly once, because all ranks take part in gathering sharded parameters. `weight` is an argument
        so that gradients include it before anything is rounded to 16 bits.
        """
        ...
