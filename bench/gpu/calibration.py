"""Which part of a device's published peaks it reaches: what `finetune_memory/devices.py` assumes, measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from finetune_memory.devices import ASSUMED, device_of
from finetune_memory.pace import BACKWARD_OF_ATTENTION, FORWARD_OF_ATTENTION
from finetune_trainer.model import variable_length
from finetune_trainer.ranks.device_test import check_device
from finetune_trainer.ranks.gang import Gang

ATTENTION = {"cuda": (4, 32, 4096, 128), "cpu": (1, 2, 64, 16)}
"""Rows, heads, tokens of a document, values of a head."""
ROUNDS = 5


def calibration_rows(device: torch.device) -> list[dict[str, object]]:
    """What is reached, the share of the peak (None if the device has none that is known), and what is assumed of it."""
    reached = check_device(Gang(0, 1, device.index or 0, device, None))
    known = device_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops, memory = (known.flops, known.memory) if known is not None else (None, None)
    found: list[tuple[str, float, float | None, float]] = [
        ("flops", reached.flops, flops, ASSUMED.flops),
        ("attention", _attention_flops(device), flops, ASSUMED.attention),
        ("memory", reached.memory, memory, ASSUMED.memory),
    ]
    return [
        {"part": name, "reached": value, "share": None if peak is None else value / peak, "assumed": assumed}
        for name, value, peak, assumed in found
    ]


def _attention_flops(device: torch.device) -> float:
    """Operations per second of attention by bounds, forward and backward, counted as the planner counts them."""
    rows, heads, length, size = ATTENTION[device.type]
    query, key, value = torch.randn((3, rows, heads, length, size), device=device, dtype=torch.bfloat16).unbind()
    for each in (query, key, value):
        each.requires_grad_()
    bounds = variable_length.document_bounds(torch.arange(length).expand(rows, length), device)

    def both() -> None:
        result, _ = variable_length.attend(nn.Module(), query, key, value, None, **bounds)
        torch.autograd.backward(result.sum())

    pairs = rows * heads * length**2 / 2
    return 2 * (FORWARD_OF_ATTENTION + BACKWARD_OF_ATTENTION) * pairs * size / _shortest(both, device)


def _shortest(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of the fastest of some rounds."""
    found = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
