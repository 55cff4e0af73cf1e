"""DoRA alone: weights with a row of zeros, such as that of a padding token, which has no direction to be divided by.

The one look at weights that preflight takes: at one value of each row, and at whole rows only where that value is zero, through a
map of the file, so that memory stays small whatever the size. Called by meta_model.py; the trainer looks again at the norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from peft.tuners.lora.layer import LoraLayer

from finetune_job.api.method import LoraInit
from finetune_job.catalogue.book import make_finding
from finetune_job.rules.rule import Finding
from finetune_trainer.model.invariants import zero_row
from finetune_trainer.model.load_shards import ADAPTER, base_name
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.weights.headers import TensorHeader, read_checkpoint

MAGNITUDES: Mapping[str, tuple[Any, int]] = {
    "F32": (np.dtype("<u4"), 0x7FFFFFFF),
    "F16": (np.dtype("<u2"), 0x7FFF),
    "BF16": (np.dtype("<u2"), 0x7FFF),
}
"""By element type: the bits of a value as a whole number, and those of them that are not its sign."""
BLOCK_ROWS = 1024
STARTS_AT_THE_BASE = (LoraInit.ZERO_B, LoraInit.GAUSSIAN)
"""Inits under which the first norms are those of the base's own rows. Orthogonal factors, too, but for rounding to 16 bits."""


def check_zero_rows(seen: ModelInspection) -> list[Finding]:
    """At most one finding: the first weight with such a row."""
    model, lora = seen.trained.model, seen.lora
    if not lora.use_dora or lora.init_lora_weights not in (*STARTS_AT_THE_BASE, LoraInit.ORTHOGONAL):
        return []
    headers = read_checkpoint(seen.directory).tensors
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(base_name(name))
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or ADAPTER not in layer.lora_magnitude_vector:
            continue
        weight = layer.get_base_layer().weight
        if lora.init_lora_weights is LoraInit.ORTHOGONAL and weight.dtype is not torch.float32:
            continue
        # A weight of which rows are trained is made anew for each who reads it, and refused elsewhere (attached.py).
        header = _stored(names.get(id(weight), []), headers)
        # A layer whose weight a loader makes out of several stored ones is left to the trainer.
        if header is None or len(header.shape) != 2 or header.dtype not in MAGNITUDES:
            continue
        by_column = bool(layer.lora_magnitude_vector[ADAPTER].fan_in_fan_out)
        number = _zero_column(header) if by_column else _zero_row(header)
        if number is not None:
            return [_zero(base_name(f"{name}.weight").removesuffix(".weight"), "column" if by_column else "row", number)]
    return []


def _stored(names: list[str], headers: Mapping[str, TensorHeader]) -> TensorHeader | None:
    """A tied weight stands in the files under one of its names."""
    return next((headers[name] for name in names if name in headers), None)


def _bits(header: TensorHeader) -> Any:
    kind, _ = MAGNITUDES[header.dtype]
    return np.memmap(header.file, dtype=kind, mode="r", offset=header.offset, shape=header.shape)


def _zero_row(header: TensorHeader) -> int | None:
    """Number of the first row whose values are all zero."""
    bits, (_, mask) = _bits(header), MAGNITUDES[header.dtype]
    candidates = np.flatnonzero((bits[:, 0] & mask) == 0)
    return next((int(row) for row in candidates if not (bits[row] & mask).any()), None)


def _zero_column(header: TensorHeader) -> int | None:
    """The same of columns, which most often the first rows decide."""
    bits, (_, mask) = _bits(header), MAGNITUDES[header.dtype]
    is_zero = np.ones(header.shape[1], dtype=bool)
    for first in range(0, header.shape[0], BLOCK_ROWS):
        is_zero &= ~(bits[first : first + BLOCK_ROWS] & mask).any(axis=0)
        if not is_zero.any():
            return None
    return int(np.flatnonzero(is_zero)[0])


def _zero(module: str, kind: str, number: int) -> Finding:
    message, fix = zero_row(module, kind, number)
    return make_finding("dora-zero-row", field="spec.method.lora.targetModules", value=module, message=message, fix=fix)
