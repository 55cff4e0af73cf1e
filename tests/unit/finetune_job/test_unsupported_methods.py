"""Each method of PEFT is supported, or has a row that says why not."""

import pytest
from peft import PeftType

from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS
from finetune_job.unsupported_methods import UNSUPPORTED


def test_each_method_of_peft_is_supported_or_has_a_reason() -> None:
    assert set(METHODS) == set(MethodType)
    assert {method.peft_type for method in METHODS.values()} - {None} == {kind.value for kind in PeftType}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_the_nearest_method_is_a_supported_one(kind: MethodType) -> None:
    assert METHODS[kind].refused == UNSUPPORTED[kind].reason
    assert METHODS[UNSUPPORTED[kind].nearest].refused == ""
