"""Dtypes, and casts as PEFT does them: first to the dtype in which PEFT holds a weight, then to the output's dtype."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""Dtypes for arithmetic, by their names in safetensors headers."""
READ_DTYPES = TORCH_DTYPES | {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""All dtypes that are read, by their names in headers: TORCH_DTYPES, and dtypes of indices and masks."""
FINITE_VALUES = 4 << 20
"""Number of values that are checked for NaN and infinity at a time; the check needs as much memory as these take in fp32."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in plans and manifests, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def round_into(values: torch.Tensor, compute: torch.dtype, out: torch.Tensor) -> None:
    """Write `values` to `out`, rounded first to `compute`, the dtype in which PEFT would hold them."""
    if compute not in (out.dtype, values.dtype):
        values = values.to(compute)
    out.copy_(values)


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass usually suffices: the sum is finite only if all values are."""
    if values.numel() > FINITE_VALUES and len(values) > 1:
        num_rows = max(1, FINITE_VALUES * len(values) // values.numel())
        return all(all_finite(rows) for rows in torch.split(values, num_rows))
    total = values.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())
