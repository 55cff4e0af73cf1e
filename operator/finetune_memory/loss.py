"""Logits and loss: a part of the rows at a time where the model lets the head be scored that way, else whole.

The sizes of a part are those that the trainer computes with (objective/cross_entropy.py).
"""

from __future__ import annotations

from finetune_job.module_names import OUTPUT_HEADS
from finetune_job.plan.element_types import VALUE_BYTES
from finetune_memory.activations import TrainingPass
from finetune_memory.model_shape import ModelShape, ParameterShape

VALUES_PER_PART = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits held at a time, by type of device: 16 MB in float32 on CPU, where they should stay near its caches, and 0.5 GB on GPU,
which needs large products. Twice that with their gradient."""
MIN_ROWS_PER_PART = 64
"""Products of fewer rows take other paths in the libraries, and give other bits."""
ROWS_RECOMPUTED = MIN_ROWS_PER_PART * 16
"""Rows at a time where logits are computed again in the backward pass."""


def rows_per_part(vocabulary: int, device_type: str) -> int:
    """How many rows' logits are computed at a time."""
    return max(VALUES_PER_PART[device_type] // vocabulary, MIN_ROWS_PER_PART)


def head_of(shape: ModelShape) -> ParameterShape | None:
    """The weight of the output head, which may be the embedding's; None where neither is known by its name and size."""
    vocabulary = shape.facts.vocabulary_size
    heads = [
        each
        for each in shape.parameters
        if each.shape[:1] == (vocabulary,) and any(f".{name}." in f".{each.name}" for name in OUTPUT_HEADS)
    ]
    found = heads or [each for each in shape.parameters if each.kind == "embedding" and each.shape[0] >= vocabulary]
    return next((each for each in found if each.is_trained), found[0] if found else None)


def loss_bytes(shape: ModelShape, during: TrainingPass) -> tuple[int, int]:
    """What is kept from the head's forward pass to its backward pass, and the most that its computation takes in addition."""
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
    # Logits; log of the softmax and the gradients of it and of what it was taken of, in float32.
    part = values * (size + 4 + 4 + 4)
    whole = 0
    if head is not None and size != VALUE_BYTES[head.dtype] and not elements.casts_parameters:
        whole += head.numel * size
    if head is not None and head.is_trained:
        whole += head.numel * 4
    return kept, rows + part + whole
