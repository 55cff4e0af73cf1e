"""How long a text a model was made for, by its configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

_STRETCHED = ("yarn", "llama3")
"""Kinds of rotary positions whose factor says how many times longer than the first training texts may be."""


def max_positions(config: PreTrainedConfig) -> int | None:
    """Of one document; None where the configuration does not say.

    Positions are often stretched in the configuration alone, as Qwen's model cards show for YaRN: `max_position_embeddings` then
    stays what it was.
    """
    written = getattr(config, "max_position_embeddings", None)
    if type(written) is not int:
        return None
    return max([written, *(_stretched(rope) for rope in _ropes(config))])


def max_row(config: PreTrainedConfig) -> int | None:
    """Of all that stands in one row of a batch; None: no limit. MPT's code makes its biases for so many keys and no more."""
    written = getattr(config, "max_seq_len", None)
    return written if config.model_type == "mpt" and type(written) is int else None


def _ropes(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """One, or one for each kind of layer."""
    ropes = getattr(config, "rope_parameters", None)
    if isinstance(ropes, dict):
        yield from (rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict))


def _stretched(rope: Mapping[str, Any]) -> int:
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if rope.get("rope_type") not in _STRETCHED or not isinstance(original, int) or not isinstance(factor, int | float):
        return 0
    return int(factor * original) if math.isfinite(factor) else 0
