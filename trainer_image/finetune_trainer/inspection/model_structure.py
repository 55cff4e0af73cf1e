"""What the trainer will build, in plain values. Without torch, because preflight holds it while it prepares the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune_memory.model_shape import ModelShape


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
    max_row: int | None
    """Longest row of a batch, all documents packed into it together, that the model's code computes; None: any."""
    stored_dtype: str
    """Element type of most of the base model's weights."""
    shape: ModelShape | None
    """For the memory planner; None where the configuration tells it too little."""
    trains_input_rows_alone: bool = False
    """Whether rows of the input embedding are trained that no output head shares: a row then learns where its token is read."""
    padding_row: int | None = None
    """Row of the input embedding that torch gives no gradient where it is read (`padding_idx`)."""
