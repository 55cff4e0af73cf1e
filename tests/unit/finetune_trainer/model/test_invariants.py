"""What the element type of a base in memory means for adapters next to it."""

from typing import Any

import pytest
import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.invariants import check_adapter_bits
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


def refuses(check: Any, reason: str) -> None:
    """`reason`: empty: it does not."""
    if not reason:
        check()
        return
    with pytest.raises(ConfigError, match=reason):
        check()
