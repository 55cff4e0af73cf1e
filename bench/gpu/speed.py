"""The benchmark of contenders within `make gpu-check`: only what the device holds, each run with a limit of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu import __main__ as benchmark
from bench.gpu.calculated import Calculated, calculated
from bench.gpu.check import MODELS
from bench.gpu.contender import OURS
from bench.gpu.scale import Rows, Scale

RUN_SECONDS = {"8B": 150.0, "8B-32k": 150.0, "8B-128k": 240.0}
"""Of a contender. By calculation steps take 12, 26 and 124 s of it; the rest is what it loads, compiles and saves."""
TOY_SIZES = {"8B": "tiny", "8B-32k": "tiny-long"}
"""Rows of 131,072 tokens would be the same at toy size."""
TOY_STEPS, TOY_RUN_SECONDS = 3, 300.0
SHOWN_DEVICE = "NVIDIA H100 80GB HBM3"
"""Of which is said without a device what is calculated."""


def throughput(scale: Scale, rows: Rows) -> str:
    """The benchmark, which keeps its figures itself. First what is asked for first, because time may run out."""
    return measure(scale, rows, "8B", ("ours", "trl") if scale.is_quick else ("ours", "compiled", "trl"))


def settings(scale: Scale, rows: Rows) -> str:
    """The same with deterministic kernels."""
    return measure(scale, rows, "8B", ("deterministic",), record="settings-8B")


def long(scale: Scale, rows: Rows) -> str:
    """The same of long rows, whose layers are computed again in the backward pass."""
    return measure(scale, rows, "8B-32k", ("ours",) if scale.is_quick else ("ours", "compiled"))


def longest(scale: Scale, rows: Rows) -> str:
    """And of rows that few devices hold."""
    return measure(scale, rows, "8B-128k", ("compiled",))


def measure(scale: Scale, rows: Rows, size: str, contenders: tuple[str, ...], record: str | None = None) -> str:
    """What is wrong; empty: all that the device holds has figures. record: the name of their file."""
    if scale.is_toy:
        rows += [_row(name, size, SHOWN_DEVICE, found) for name, found in _calculated(contenders, size, SHOWN_DEVICE)]
        chosen, toy = contenders if size in TOY_SIZES else (), ["--steps", str(TOY_STEPS)]
        run_size, seconds = TOY_SIZES.get(size, ""), TOY_RUN_SECONDS
    else:
        device, has = torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
        too_large = {name: found for name, found in _calculated(contenders, size, device) if found.device_bytes > has}
        rows += [_row(name, size, device, found) | {"not shown": "it needs more memory"} for name, found in too_large.items()]
        chosen, toy = tuple(name for name in contenders if name not in too_large), []
        run_size, seconds = size, RUN_SECONDS[size]
    if not chosen:
        return ""
    options = ["--size", run_size, "--runs", "1", "--run-seconds", str(seconds), *toy]
    options += ["--record", record] if record else []
    options += ["--models", str(Path(os.environ[MODELS], run_size.partition("-")[0]))] if MODELS in os.environ else []
    code = benchmark.main([*options, "--contenders", *chosen])
    rows.append({"size": run_size, "exit code": code})
    return f"{run_size} failed" if code else ""


def _calculated(contenders: tuple[str, ...], size: str, device: str) -> Iterator[tuple[str, Calculated]]:
    for name in contenders:
        if name in OURS and (found := calculated(name, size, 1, device)) is not None:
            yield name, found


def _row(name: str, size: str, device: str, found: Calculated) -> dict[str, object]:
    return {
        "contender": name,
        "size": size,
        "by calculation on": device,
        "tokens per second": round(found.tokens_per_second),
        "GiB": round(found.device_bytes / 2**30, 1),
    }
