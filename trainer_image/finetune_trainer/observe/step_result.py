"""What is known of one optimizer step after it: the trainer's answer, and what the observation is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    loss: float
    """Mean over the supervised tokens of the global batch."""
    gradient_norm: float
    """Before clipping, over all ranks."""
    supervised_tokens: int
    tokens: int
    """Of documents, padding not counted, over all ranks."""
    squared_document_lengths: int
    """Sum over all documents of length squared, over all ranks: for the work that attention does."""
    data_seconds: float
    """What this rank waited for batches."""
    compute_seconds: tuple[float, ...]
    """What each rank computed, by rank. On CPU the main thread's time without waiting, so that slow ranks show; on a GPU elapsed
    time without that for batches, which includes waiting for other ranks inside collectives."""
    stop: bool
    """Some rank has been asked to stop."""
    loss_scale: float
    """Factor of the loss with which the gradients were finite."""
