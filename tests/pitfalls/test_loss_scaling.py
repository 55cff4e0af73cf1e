"""float16: gradients that no scaler takes, an optimizer whose epsilon is zero, and activations that are infinite."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.pitfalls.manifests import findings, plans

RULE = "float16-range"


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
    assert "float16-adapter" in findings(type="LoRA", dtype="float16", lora={"autocastAdapterDtype": False})


def test_adams_epsilon_is_zero_in_float16():
    """The gradient of lora_A is zero at the first step, because lora_B is: 0 / 0."""
    assert stepped(torch.float16).isnan().all()
    assert stepped(torch.float32).isfinite().all()
    assert stepped(torch.bfloat16).isfinite().all()
    half = {"autocastAdapterDtype": False}
    assert "float16-adapter" in findings(type="LoRA", dtype="float16", lora=half)
    assert "float16-adapter" not in findings(type="LoRA", dtype="float16")
    assert "float16-adapter" not in findings(type="LoRA", dtype="bfloat16", lora=half)


def test_large_activations_are_infinite_in_float16():
    """A gated layer multiplies two activations, of a few hundred each; the bfloat16 of the fix has float32's range."""
    wrong, right = plans(RULE, {"model.dtype": "float16"})
    for plan, overflows in ((wrong, True), (right, False)):
        assert plan.model.dtype is not None
        layer = LlamaMLP(LlamaConfig(hidden_size=4, intermediate_size=4, num_attention_heads=1)).to(
            getattr(torch, plan.model.dtype)
        )
        with torch.no_grad():
            for weight in layer.parameters():
                weight.copy_(torch.eye(4))
        output = layer(torch.full((1, 4), 300.0, dtype=getattr(torch, plan.model.dtype)))
        assert bool(output.isfinite().any()) is not overflows


def test_large_weights_are_infinite_in_float16():
    """What a bfloat16 base holds and a merge into float16 would lose."""
    wrong, right = plans("merge-dtype-overflow", {"model.dtype": "bfloat16", "merge.dtype": "float16"})
    base = torch.full((4,), 70_000.0, dtype=torch.bfloat16)
    for plan, overflows in ((wrong, True), (right, False)):
        merged = base.to(getattr(torch, plan.merge.dtype or "bfloat16"))
        assert bool(merged.isinf().all()) is overflows
