"""Merged tensors against base and adapter, without a model: untouched ones byte for byte, changed ones against fp64.

In: three directories. Out: TensorFigures with every fault found. Called by run.py. Deliberately shares no arithmetic with
the merge: the names come from the same pure assignment, the values from the formulas in fp64.
"""

import hashlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from finetune_trainer.merge.adapter_settings import adapter_settings
from finetune_trainer.merge.assignment import Change, LowRank, Orientation, assign
from finetune_trainer.merge.headers import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    TensorHeader,
    read_adapter,
    read_checkpoint,
    read_json,
)
from finetune_trainer.merge.writer import MANIFEST_FILE
from finetune_trainer.verify.gate import UNIT_ROUNDOFF

SAMPLE_ROWS = 16
"""Rows of each changed tensor that are computed again in fp64, the first and the last among them."""
READ_BYTES = 8 << 20

_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROUNDOFF = {
    "F64": 2.0**-53,
    "F32": UNIT_ROUNDOFF["float32"],
    "F16": UNIT_ROUNDOFF["float16"],
    "BF16": UNIT_ROUNDOFF["bfloat16"],
}
_FP32 = UNIT_ROUNDOFF["float32"]


@dataclass
class TensorFigures:
    """What was compared, and sentences about what is wrong. worst_rounding: largest error over what rounding allows."""

    num_untouched: int = 0
    num_changed: int = 0
    num_values_sampled: int = 0
    worst_rounding: float = 0.0
    num_changed_tensors_with_base_bytes: int = 0
    is_zero_adapter: bool = False
    faults: list[str] = field(default_factory=list)


def check_tensors(base: Path, adapter: Path, merged: Path) -> TensorFigures:
    """Compares all tensors. Raises MergeError only when a directory cannot be read as what it should be."""
    base_tensors, merged_tensors = read_checkpoint(base).tensors, read_checkpoint(merged).tensors
    settings = adapter_settings(read_json(adapter / ADAPTER_CONFIG_FILE))
    changes = assign(base_tensors, read_adapter(adapter).tensors, settings, read_json(base / CONFIG_FILE))
    figures = TensorFigures()
    figures.faults += _manifest_faults(merged)
    for name in sorted(base_tensors.keys() ^ merged_tensors.keys()):
        where = "the merged model" if name in base_tensors else "the base model"
        figures.faults.append(f"tensor {name} is missing in {where}")
    figures.is_zero_adapter = all(_is_zero_change(change) for change in changes.values())
    for name in sorted(base_tensors.keys() & merged_tensors.keys()):
        source, result = base_tensors[name], merged_tensors[name]
        if source.shape != result.shape:
            figures.faults.append(f"tensor {name} has shape {list(result.shape)}, the base has {list(source.shape)}")
        elif name in changes:
            figures.num_changed += 1
            figures.num_changed_tensors_with_base_bytes += _is_cast_of(source, result, source.dtype)
            _check_changed(changes[name], result, figures)
        else:
            figures.num_untouched += 1
            if not _is_cast_of(source, result, source.dtype):
                figures.faults.append(f"tensor {name} differs from the base, although the adapter does not touch it")
    if figures.num_changed and figures.num_changed == figures.num_changed_tensors_with_base_bytes and not figures.is_zero_adapter:
        figures.faults.append(
            "the merged model has the base model's weights in every tensor that the adapter changes: the adapter was not "
            "merged, or is smaller than the dtype's precision (merge into a wider dtype)"
        )
    return figures


def _manifest_faults(merged: Path) -> Iterator[str]:
    path = merged / MANIFEST_FILE
    if not path.exists():
        return
    for entry in json.loads(path.read_text(encoding="utf-8"))["files"]:
        file = merged / entry["name"]
        if not file.exists():
            yield f"file {entry['name']} is in the manifest and not on disk"
            continue
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != entry["sha256"]:
                yield f"file {entry['name']} does not have the sha256 of the manifest: it changed after the merge"


def _is_zero_change(change: Change) -> bool:
    """True when the change cannot alter any value: lora_B all zero, no magnitudes, nothing replaced."""
    if change.replacement is not None:
        return _is_cast_of(change.replacement, change.base, change.base.dtype)
    low_rank = change.low_rank
    if low_rank is None or low_rank.magnitude is not None:
        return False
    return any(not bool(_load(part).any()) for part in (low_rank.b, low_rank.a))


def _check_changed(change: Change, result: TensorHeader, figures: TensorFigures) -> None:
    name = change.base.name
    if change.low_rank is None:
        if change.replacement is not None and not _is_cast_of(change.replacement, result, change.base.dtype):
            figures.faults.append(f"tensor {name} is not the adapter's copy {change.replacement.name}")
        return
    exact = _Exact(change, change.low_rank, result.dtype)
    num_rows = result.shape[0]
    chosen = {0, num_rows - 1} | set(random.Random(name).sample(range(num_rows), min(num_rows, SAMPLE_ROWS)))  # noqa: S311
    for row in sorted(chosen):
        merged = _row(result, row).double()
        expected, allowed = exact.row(row)
        figures.num_values_sampled += merged.numel()
        ratio = (merged - expected).abs() / allowed
        worst = int(torch.nan_to_num(ratio, nan=math.inf).argmax())
        figures.worst_rounding = max(figures.worst_rounding, float(torch.nan_to_num(ratio, nan=math.inf)[worst]))
        if not bool(ratio[worst] <= 1):
            figures.faults.append(
                f"tensor {name} at [{row}, {worst}] is {float(merged[worst]):.9g}, fp64 gives {float(expected[worst]):.9g}; "
                f"rounding allows {float(allowed[worst]):.2g}"
            )
            return


class _Exact:
    """Rows of one merged weight in fp64, with the error that rounding explains."""

    def __init__(self, change: Change, low_rank: LowRank, out_dtype: str) -> None:
        self._source = change.replacement or change.base
        self._held_dtype = torch.promote_types(_TORCH_DTYPES[change.base.dtype], _TORCH_DTYPES[out_dtype])
        self._low_rank = low_rank
        self._a, self._b = _load(low_rank.a).double(), _load(low_rank.b).double()
        self._magnitude = _load(low_rank.magnitude).double() if low_rank.magnitude else None
        self._is_transposed = low_rank.orientation is not Orientation.LINEAR
        self._held_roundoff = torch.finfo(self._held_dtype).eps / 2
        is_rounded_twice = self._held_dtype != _TORCH_DTYPES[out_dtype]
        self._roundoff = _ROUNDOFF[out_dtype] + (self._held_roundoff if is_rounded_twice else 0.0)
        # Smallest distance of subnormal float16 numbers; other dtypes reach so far down that it does not matter.
        self._floor = 2.0**-24 if "F16" in (out_dtype, change.base.dtype) else 1e-37
        self._column_norms = self._norms_of_columns() if self._magnitude is not None and self._is_transposed else None

    def row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(exact values, allowed absolute errors) of one stored row."""
        weight, delta, product_error = self._parts(row)
        exact = weight + delta
        # fp32: a sum of r products, the scaling, the addition
        error = product_error + 2 * _FP32 * (weight.abs() + delta.abs())
        if self._low_rank.orientation is Orientation.EMBEDDING and self._magnitude is None:
            error += self._held_roundoff * delta.abs()
        if self._magnitude is not None:
            norms = self._column_norms
            factor = self._magnitude[row] / exact.norm() if norms is None else self._magnitude / norms
            num_terms = self._source.shape[0 if self._is_transposed else 1]
            exact = exact * factor
            error = error * factor.abs() + (16 + num_terms / 64) * _FP32 * exact.abs()
        error += self._roundoff * 1.01 * exact.abs()
        return exact, error + self._floor

    def _parts(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = _row(self._source, row).to(self._held_dtype).double()
        scaling = self._low_rank.scaling
        left, right = (self._a[:, row], self._b.T) if self._is_transposed else (self._b[row], self._a)
        rank = left.shape[0]
        return weight, scaling * (left @ right), (rank + 2) * _FP32 * abs(scaling) * (left.abs() @ right.abs())

    def _norms_of_columns(self) -> torch.Tensor:
        squares = torch.zeros(self._source.shape[1], dtype=torch.float64)
        for row in range(self._source.shape[0]):
            weight, delta, _ = self._parts(row)
            squares += (weight + delta) ** 2
        return squares.sqrt()


def _row(tensor: TensorHeader, row: int) -> torch.Tensor:
    num_bytes = tensor.num_bytes // tensor.shape[0]
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset + row * num_bytes)
        return torch.frombuffer(bytearray(file.read(num_bytes)), dtype=_TORCH_DTYPES[tensor.dtype])


def _load(tensor: TensorHeader) -> torch.Tensor:
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return torch.frombuffer(bytearray(file.read(tensor.num_bytes)), dtype=_TORCH_DTYPES[tensor.dtype]).view(tensor.shape)


def _is_cast_of(source: TensorHeader, result: TensorHeader, held_as: str) -> bool:
    """True when `result` has the values of `source`, held in the wider of `held_as` and its own dtype, then cast to the latter."""
    if source.dtype != result.dtype and not {source.dtype, result.dtype} <= _TORCH_DTYPES.keys():
        return False
    num_elements = math.prod(source.shape)
    step = READ_BYTES // 8
    with source.file.open("rb") as first, result.file.open("rb") as second:
        first.seek(source.offset)
        second.seek(result.offset)
        for start in range(0, num_elements, step):
            count = min(step, num_elements - start)
            left = bytearray(first.read(count * source.num_bytes // num_elements))
            right = bytearray(second.read(count * result.num_bytes // num_elements))
            if source.dtype == result.dtype == held_as:
                if left != right:
                    return False
                continue
            values = torch.frombuffer(left, dtype=_TORCH_DTYPES[source.dtype])
            out_dtype = _TORCH_DTYPES[result.dtype]
            held = values.to(torch.promote_types(_TORCH_DTYPES[held_as], out_dtype))
            if not torch.equal(held.to(out_dtype), torch.frombuffer(right, dtype=out_dtype)):
                return False
    return True
