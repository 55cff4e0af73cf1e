"""What the trainer will build, in plain values. Without torch, because preflight holds it while it prepares the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelStructure:
    """What the trainer will build."""

    wrap_classes: tuple[str, ...]
    fsdp_units: tuple[str, ...]
    dtypes: dict[str, str]
    trainable: dict[str, tuple[int, ...]]
    saved_tensors: dict[str, tuple[int, ...]]
    fixed_tensors: dict[str, tuple[int, ...]]
    """What the adapter holds beside what is trained, such as random projections."""
    adapter_settings: dict[str, Any] | None
    """Content of adapter_config.json; None for full fine-tuning."""
    vocabulary_size: int
    """Rows of the input embedding."""
    max_positions: int | None
    """Longest document that the model was made for, where its configuration says."""
