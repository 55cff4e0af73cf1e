"""A base that nothing casts is held in the type of the computation."""

import pytest

from finetune_job.plan.element_types import resolve_elements
from tests.support.tiny_model import plan_of, tiny_spec


@pytest.mark.parametrize("param", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("ranks", "version"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_only_fsdp_2_casts_what_it_gathers(ranks: int, version: int, stored: str, param: str) -> None:
    parallelism = {"processesPerNode": ranks, "fsdp": {"version": version, "mixedPrecision": {"paramDtype": param}}}
    elements = resolve_elements(plan_of(tiny_spec(parallelism=parallelism)), stored)
    gathers = ranks == 2 and version == 2
    assert elements.casts_parameters == gathers
    # A float32 base under autocast is as exact as can be, and stays.
    assert elements.load == (stored if gathers or stored == "float32" else param)
    assert elements.param == param
