"""The planner against the peaks that one H200 was measured at, case by case (bench/results/gpu/planner.json).

The figures hold three things that are no part of a job's plan any more, or never were. They are taken off here, each by hand:
* Output layers of cases before, which had not been freed: 125 MiB of weights in a block of 126 MiB, as torch's allocator rounds.
  Between two collections there is one more with each case, and the residuals of cases of one size agree within a MiB then.
* In cases of 8,192 tokens the gradient of the logits of the first part, 4,194 rows of 32,000, while the second was computed.
* What adapters of their own forward pass kept under `Selective`: 16 layers' results of 18,432 values of two bytes a token.
"""

import json
from pathlib import Path

import pytest

from bench.memory.__main__ import gpu_cases, predicted_allocation
from tests.support.memory_cases import MemoryCase

MIB = 2**20
RECORD = Path(__file__).parents[3] / "bench/results/gpu/planner.json"
LEFT_OVER = (0, 1, 0, 1, 2, 3, 3, 5, 6, 7, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2)
"""Output layers, in the order of the cases."""
WORKSPACES = 64 * MIB
"""torch gives cuBLAS 32 MiB on this device for each thread that computes, forward and backward (aten/src/ATen/cuda/
CublasHandlePool.cpp, parseChosenWorkspaceSize); the planner has them in its gibibyte of CUDA."""
TOLERANCE = 0.01
ROWS, VOCABULARY = 4194, 32_000
KEPT_BY_SELECTIVE = 16 * 18_432 * 2


def of_the_part_before(case: MemoryCase) -> int:
    """What the trainer had at its fullest moment, less what the largest part takes: 14 bytes a logit, and 2 of the one before."""
    scored = case.rows * (case.length - 1)
    second = scored - ROWS
    return 0 if second <= 0 else 2 * ROWS * VOCABULARY + 14 * (second - ROWS) * VOCABULARY


def kept_then(case: MemoryCase) -> int:
    is_selective = case.spec.get("training", {}).get("activationCheckpointing") == "Selective"
    return case.rows * case.length * KEPT_BY_SELECTIVE if case.is_fused and is_selective else 0


def test_a_step_of_a_1b_model_takes_what_is_planned() -> None:
    rows = {row["case"]: row["measured"] for row in json.loads(RECORD.read_text())["rows"]}
    cases = gpu_cases()
    assert [case.name for case in cases] == list(rows)
    found = {
        case.name: predicted_allocation(case) + WORKSPACES + of_the_part_before(case) + kept_then(case) + 126 * MIB * left
        for case, left in zip(cases, LEFT_OVER, strict=True)
    }
    assert found == {name: pytest.approx(measured, rel=TOLERANCE) for name, measured in rows.items()}
