"""LoRA's own forward pass against PEFT's: the same losses and gradients, of the same weights; and no cast of what is large."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_trainer.model.adapters import attach
from finetune_trainer.model.fused_adapters import fuse_adapters
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.train.recorded_steps import distance

IDS = torch.arange(4 * 24).view(4, 24) * 7 % 264
SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
# Of each of two layers: q, k, v, o, gate, up, down; of GPT-2 c_attn, c_proj, c_fc, c_proj.
LAYERS = {"llama": 14, "gpt2": 8}
ROUNDING = 2**-5
"""Relative, of a gradient through two layers of products with 8 bits each; up to 0.015 was measured."""


def adapted(kind: str, dtype: torch.dtype, **lora: Any) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SIZES))
    plan = plan_of(tiny_spec(method={"type": lora.pop("type", "LoRA"), "lora": {"r": 4, "loraAlpha": 6, **lora}}))
    model = attach(AutoModelForCausalLM.from_config(config, dtype=dtype), plan)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def step(model: Any, autocast: torch.dtype | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return loss.item(), found


@pytest.mark.parametrize("kind", LAYERS)
def test_losses_and_gradients_are_those_of_peft(kind: str) -> None:
    model = adapted(kind, torch.float32)
    loss, wanted = step(model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert fuse_adapters(model, ()) == LAYERS[kind]
    fused_loss, found = step(model)
    assert fused_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == wanted.keys()
    assert max(distance(gradient, wanted[name]) for name, gradient in found.items()) <= 1e-6
    assert before.keys() == model.state_dict().keys()
    with model.disable_adapter():
        bare = model(input_ids=IDS, labels=IDS, use_cache=False).loss.item()
    assert bare != pytest.approx(loss, rel=1e-5)
    merged = model.merge_and_unload()
    assert merged(input_ids=IDS, labels=IDS, use_cache=False).loss.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_in_16_bits_trained_weights_stay_float32_and_the_distance_is_their_rounding(autocast: torch.dtype | None) -> None:
    """bfloat16 keeps 8 bits: both ways are measured from the same step in float32."""
    exact = adapted("llama", torch.float32)
    _, wanted = step(exact)
    model = adapted("llama", torch.bfloat16)
    model.load_state_dict({name: each.to(model.state_dict()[name].dtype) for name, each in exact.state_dict().items()})
    _, plain = step(model, autocast)
    fuse_adapters(model, ())
    _, found = step(model, autocast)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    for name, gradient in found.items():
        # Without autocast PEFT multiplies in float32.
        bound = ROUNDING if autocast is None else 1.5 * distance(plain[name], wanted[name]) + 2e-3
        assert distance(gradient, wanted[name]) <= bound, name


class _Large(TorchDispatchMode):
    """Casts of all tokens' values, and products in float32: names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.casts, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name == "aten::_to_copy" and result.numel() >= IDS.numel() * 32:
            self.casts += 1
        if name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm") and result.dtype is torch.float32:
            self.products += 1
        return result


def test_no_layer_casts_its_input_or_multiplies_in_float32() -> None:
    model = adapted("llama", torch.bfloat16)
    counts = []
    for _ in range(2):
        with _Large() as seen:
            model.get_base_model().model(input_ids=IDS, use_cache=False)
        counts.append((seen.casts, seen.products))
        fuse_adapters(model, ())
    # Two norms in each layer and one at the end compute in float32 and cast back, whichever code adds the adapters.
    norms = 2 * (2 * 2 + 1)
    assert counts[1] == (norms, 0)
    # PEFT casts the input of each of seven layers, and has both products in float32.
    assert counts[0][0] >= norms + 14
    assert counts[0][1] == 28


@pytest.mark.parametrize(
    ("lora", "units", "count"),
    [
        ({}, (), 14),
        ({"loraDropout": "0.1"}, (), 14),
        ({"type": "DoRA"}, (), 0),
        ({"initLoraWeights": "pissa"}, (), 0),
        ({}, ("base_model.model.model.layers.0",), 14),
        ({}, ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default",), 13),
    ],
)
def test_only_plain_lora_has_it(lora: dict[str, Any], units: tuple[str, ...], count: int) -> None:
    assert fuse_adapters(adapted("llama", torch.float32, **lora), units) == count
