"""What the element type of a base in memory means for adapters next to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.invariants import check_adapter_bits, check_decomposed
from tests.support.method_settings import SETTINGS
from tests.support.tiny_model import plan_of, tiny_spec


def plan(method: str, fsdp: dict[str, Any], dtype: str | None = None) -> Any:
    spec = tiny_spec(
        parallelism={"processesPerNode": 2, "fsdp": fsdp},
        model={"source": "pvc://models/tiny"} | ({"dtype": dtype} if dtype else {}),
        merge={"enabled": False},
    )
    return plan_of({**spec, "method": {"type": method, "settings": SETTINGS[method]}})


@pytest.mark.parametrize(
    ("fsdp", "stored", "is_refused"),
    [
        ({"version": 1}, torch.bfloat16, True),
        ({"version": 1}, torch.float32, False),
        # Units of their own, which hold float32.
        ({"version": 1, "peftWrapPolicy": True, "useOrigParams": False}, torch.bfloat16, False),
    ],
)
def test_adapters_that_share_a_flat_parameter_with_16_bits_are_refused(
    fsdp: dict[str, Any], stored: torch.dtype, is_refused: bool
) -> None:
    refuses(lambda: check_adapter_bits(plan("OFT", fsdp), stored), "small updates vanish" if is_refused else "")


@pytest.mark.parametrize(
    ("stored", "dtype", "is_refused"),
    [
        (torch.float32, "bfloat16", True),
        (torch.float16, "bfloat16", True),
        (torch.bfloat16, "float32", False),
        (torch.bfloat16, None, False),
    ],
)
def test_psoft_on_a_base_that_is_rounded_for_the_training_is_refused(
    stored: torch.dtype, dtype: str | None, is_refused: bool
) -> None:
    refuses(lambda: check_decomposed(plan("PSOFT", {}, dtype), stored), "give other vectors" if is_refused else "")
    check_decomposed(plan("LoHa", {}, dtype), stored)


def refuses(check: Any, reason: str) -> None:
    """`reason`: empty: it does not."""
    if not reason:
        check()
        return
    with pytest.raises(ConfigError, match=reason):
        check()


def test_why_psoft_is_refused_there() -> None:
    """Rounding turns some of the singular vectors around, which PSOFT's file does not hold."""
    generator = torch.Generator().manual_seed(0)
    num_turned = 0
    for _ in range(20):
        weight = torch.randn(128, 128, generator=generator)
        vectors, others = (torch.linalg.svd(each)[2][:32] for each in (weight, weight.bfloat16().float()))
        num_turned += int(((vectors * others).sum(dim=1) < -0.9).sum())
    assert num_turned > 0
