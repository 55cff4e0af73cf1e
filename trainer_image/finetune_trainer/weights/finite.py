"""Searches stored weights for NaN and infinity, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from finetune_trainer.files import open_regular
from finetune_trainer.weights.errors import BrokenCheckpointError
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
    size = _BLOCK * kind.itemsize
    # The file is not mapped into memory: if it were cut meanwhile, a signal would end this process.
    with open_regular(header.file) as file:
        file.seek(header.offset)
        for first in range(0, header.num_bytes, size):
            block = file.read(min(size, header.num_bytes - first))
            if len(block) < min(size, header.num_bytes - first):
                raise BrokenCheckpointError(
                    f"{header.file}: ended inside tensor {header.name} while it was read. Fetch it again."
                )
            bits = np.frombuffer(block, dtype=kind)
            if int((bits & kind.type(magnitude)).max()) >= _INFINITY[header.dtype]:
                return False
    return True
