"""Activations, logits and loss: the fullest moment of a real forward and backward pass on the CPU, within 10 % of the prediction.

Every storage that torch makes is counted, so what operations hold for a moment counts, too.
"""

import pytest

from tests.support.memory_cases import CASES, MemoryCase, measured_peak, predicted_peak

TOLERANCE = 0.10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_peak_is_as_predicted(case: MemoryCase) -> None:
    measured = measured_peak(case)
    assert abs(predicted_peak(case) / measured - 1) < TOLERANCE, f"{predicted_peak(case):,} predicted, {measured:,} measured"
