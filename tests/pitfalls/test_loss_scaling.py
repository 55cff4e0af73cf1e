"""float16: gradients that no scaler takes, and an optimizer whose epsilon is zero."""

from __future__ import annotations

import pytest
import torch

from tests.pitfalls.manifests import findings

RULE = "float16-without-loss-scaling"


def stepped(dtype: torch.dtype) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return weight.detach()


def test_a_scaler_takes_no_float16_gradients():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum().float()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    assert RULE in findings(type="LoRA", dtype="float16")


def test_adams_epsilon_is_zero_in_float16():
    """The gradient of lora_A is zero at the first step, because lora_B is: 0 / 0."""
    assert stepped(torch.float16).isnan().all()
    assert stepped(torch.float32).isfinite().all()
    assert stepped(torch.bfloat16).isfinite().all()
    half = {"autocastAdapterDtype": False}
    assert "float16-adapter" in findings(type="LoRA", dtype="float16", lora=half)
    assert "float16-adapter" not in findings(type="LoRA", dtype="float16")
    assert "float16-adapter" not in findings(type="LoRA", dtype="bfloat16", lora=half)
