"""The memory of logits and loss, which are computed for a part of the rows at a time if the model allows it, else for all rows.

The trainer uses the same part sizes (objective/cross_entropy.py).
"""

from __future__ import annotations

from finetune_job.module_names import OUTPUT_HEADS
from finetune_job.plan.element_types import VALUE_BYTES
from finetune_memory.activations import TrainingPass
from finetune_memory.model_shape import ModelShape, ParameterShape

VALUES_PER_PART = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Number of logits held at a time, by type of device. In float32 they take 16 MB on a CPU, to stay near its caches, and 0.5 GB on
a GPU, which needs large products; with their gradient, twice that."""
MIN_ROWS_PER_PART = 64
"""Minimum number of rows in a part: for fewer rows, the libraries take other code paths, whose results differ in some bits."""
ROWS_RECOMPUTED = MIN_ROWS_PER_PART * 16
"""Number of rows computed at a time if logits are recomputed in the backward pass."""


def rows_per_part(vocabulary: int, device_type: str) -> int:
    """Return the number of rows whose logits are computed at a time."""
    return max(VALUES_PER_PART[device_type] // vocabulary, MIN_ROWS_PER_PART)


def head_of(shape: ModelShape) -> ParameterShape | None:
    """Find the output head's weight, or the embedding's if the two are tied. None if neither is recognised by name and size."""
    vocabulary = shape.facts.vocabulary_size
    weights = [weight for weight in shape.parameters if weight.shape[:1] == (vocabulary,)]
    heads = [weight for weight in weights if any(f".{name}." in f".{weight.name}" for name in OUTPUT_HEADS)]
    candidates = heads or [weight for weight in shape.parameters if weight.kind == "embedding" and weight.shape[0] >= vocabulary]
    return next((weight for weight in candidates if weight.is_trained), candidates[0] if candidates else None)


def loss_bytes(shape: ModelShape, during: TrainingPass) -> tuple[int, int]:
    """Count the bytes kept from the head's forward to its backward pass, and the most that its computation takes in addition."""
    facts, elements, tokens = shape.facts, during.elements, during.work.tokens
    hidden, vocabulary, size = facts.hidden_size, facts.vocabulary_size, elements.product
    head = head_of(shape)
    norm = tokens * (hidden * 4 + 4)
    if facts.has_whole_logits:
        # The logits, what scaling or capping them keeps, the rows that are scored, and their gradient.
        logits = tokens * vocabulary * size
        part = min(tokens, ROWS_RECOMPUTED) * vocabulary
        return norm + 3 * logits, 2 * logits + part * (4 + 4 + 4)
    kept = norm + tokens * hidden * elements.stream
    rows = 2 * tokens * hidden * size
    values = min(rows_per_part(vocabulary, "cuda" if during.work.on_gpu else "cpu"), tokens) * vocabulary
    # The logits and, in float32, their log softmax, the gradient of that, and the gradient of its input.
    part = values * (size + 4 + 4 + 4)
    whole = 0
    if head is not None and size != VALUE_BYTES[head.dtype] and not elements.casts_parameters:
        whole += head.numel * size
    if head is not None and head.is_trained:
        whole += head.numel * 4
    return kept, rows + part + whole
