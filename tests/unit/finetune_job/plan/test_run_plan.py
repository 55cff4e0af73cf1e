"""What a plan says of numbers and of the method."""

import pytest

from finetune_job.api.method import LoraBias
from finetune_job.plan.run_plan import optional_float
from tests.support.builders import a_job


def test_a_number_that_is_unset_stays_unset() -> None:
    assert (optional_float("2e-4"), optional_float("0"), optional_float(None)) == (2e-4, 0.0, None)


@pytest.mark.parametrize(
    ("lora", "trains_parts"), [({}, False), ({"modulesToSave": ["lm_head"]}, True), ({"bias": LoraBias.ALL.value}, True)]
)
def test_whole_modules_and_biases_are_parts_of_the_base(lora: dict[str, object], trains_parts: bool) -> None:
    method = a_job().spec("method.lora", lora).plan().method
    assert method.trains_parts_of_the_base is trains_parts
    assert method.trains_adapter


def test_full_fine_tuning_trains_no_adapter() -> None:
    method = a_job().spec("method", {"type": "Full"}).plan().method
    assert (method.trains_adapter, method.trains_parts_of_the_base, method.autocast_adapter_dtype) == (False, False, False)
