"""Searches stored weights for NaN and infinity, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from finetune_trainer.weights.headers import TensorHeader, read_checkpoint

MAGNITUDES: Mapping[str, tuple[Any, int]] = {
    "F32": (np.dtype("<u4"), 0x7FFFFFFF),
    "F16": (np.dtype("<u2"), 0x7FFF),
    "BF16": (np.dtype("<u2"), 0x7FFF),
}
"""Element type -> integer type of its bits, and a mask of all bits but the sign."""
_INFINITY = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""Element type -> bits of infinity. The bits of NaN are larger."""
_MASKS = re.compile(r"(^|[._])mask$|(attn|attention)\.(masked_)?bias$")
"""Matches names of attention masks, which some models store with infinity at masked positions."""
_BLOCK = 1 << 22


def first_not_finite(directory: Path) -> TensorHeader | None:
    """Return a model's first tensor that holds a non-finite value; None if all values are finite."""
    return next((header for header in read_checkpoint(directory).tensors.values() if not _is_finite(header)), None)


def _is_finite(header: TensorHeader) -> bool:
    if header.dtype not in _INFINITY or not header.num_bytes or _MASKS.search(header.name):
        return True
    kind, magnitude = MAGNITUDES[header.dtype]
    bits = np.memmap(header.file, dtype=kind, mode="r", offset=header.offset, shape=(header.num_bytes // kind.itemsize,))
    blocks = (bits[first : first + _BLOCK] for first in range(0, len(bits), _BLOCK))
    return all(int((block & kind.type(magnitude)).max()) < _INFINITY[header.dtype] for block in blocks)
