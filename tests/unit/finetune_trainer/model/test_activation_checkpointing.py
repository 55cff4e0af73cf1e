"""Activation checkpointing: equal gradients, and what is kept is what was computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Gemma3nTextConfig

from finetune_job.api.training import ActivationCheckpointing
from finetune_trainer.model import sharded
from finetune_trainer.model.activation_checkpointing import checkpoint_activations, selective_checkpoint_contexts
from finetune_trainer.train.step import compute_gradients
from tests.support.method_settings import SETTINGS
from tests.support.shapes import SmallRun, plan_of_shape, write_shape
from tests.support.small_gang import Unchanged
from tests.support.tiny_model import plan_of, write_tiny_llama
from tests.unit.finetune_trainer.model.sharded_gang import FULL, TOKENS, computed, spec_of

GEMMA_3N = Gemma3nTextConfig(
    vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size_per_layer_input=264, hidden_size_per_layer_input=8, laurel_rank=4, num_kv_shared_layers=0,
    altup_num_inputs=2, layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.0, 0.0],
)  # fmt: skip


INSIDE_LAYERS = {"version": 2, "autoWrapPolicy": "SIZE_BASED_WRAP", "minNumParams": 1500}


@pytest.mark.parametrize("fsdp", [{"version": 2}, {"version": 1}, INSIDE_LAYERS], ids=["fsdp2", "fsdp1", "units inside layers"])
def test_recomputed_activations_give_the_same_gradients_bit_for_bit(tmp_path: Path, fsdp: dict[str, Any]) -> None:
    base = write_tiny_llama(tmp_path / "base")
    method = {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}} if fsdp["version"] == 2 else FULL
    expected = computed(tmp_path / "None", base, method, fsdp)
    for kind in ("Selective", "Full"):
        for (loss, gradients), (expected_loss, expected_gradients) in zip(
            computed(tmp_path / kind, base, method, fsdp, activationCheckpointing=kind), expected, strict=True
        ):
            assert torch.equal(loss, expected_loss)
            assert [name for name in expected_gradients if not torch.equal(gradients[name], expected_gradients[name])] == []


def test_selective_recomputation_repeats_no_matrix_product(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base")
    counts = {kind: products(base, kind) for kind in ("None", "Selective", "Full")}
    assert counts["Selective"] == counts["None"] < counts["Full"]


@pytest.mark.parametrize("method", ["BOFT", "OFT", "LoHa"])
def test_what_is_kept_does_not_hold_what_an_adapter_adds_in_place(tmp_path: Path, method: str) -> None:
    base = write_tiny_llama(tmp_path / "base")
    plain, kept = (adapter_gradients(base, method, kind) for kind in ("None", "Selective"))
    assert any(bool(values.any()) for values in plain.values())
    for name, values in plain.items():
        assert torch.allclose(kept[name], values, rtol=1e-4, atol=1e-6), name


def test_what_is_kept_does_not_hold_what_a_model_adds_in_place() -> None:
    """Gemma 3n adds per-layer inputs to a product's result."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GEMMA_3N)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    found = []
    for kind in (ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE):
        checkpoint_activations(model.train(), kind)
        model.zero_grad()
        model(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    plain, kept = found
    assert kept.keys() == plain.keys()
    assert [name for name, values in plain.items() if not torch.allclose(kept[name], values, rtol=1e-4, atol=1e-6)] == []


def test_attention_that_draws_random_numbers_is_not_kept() -> None:
    """The second pass begins with the first one's generator; numbers that a kept result does not draw would shift the next."""
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    query = torch.empty(1, 2, 8, 16, device="meta")
    for dropout, is_kept in ((0.0, True), (0.1, False)):
        keep, _ = selective_checkpoint_contexts()
        with keep:
            attention(query, query, query, None, True, dropout)
        assert bool(keep.kept) == is_kept


def test_what_is_kept_serves_one_backward_pass() -> None:
    layer, inputs = nn.Linear(4, 4), torch.ones(2, 4)
    loss = checkpoint(
        lambda given: layer(layer(given).relu()), inputs, use_reentrant=False, context_fn=selective_checkpoint_contexts
    ).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="serve one backward pass"):
        loss.backward()


def adapter_gradients(base: Path, method: str, kind: str) -> dict[str, torch.Tensor]:
    from finetune_trainer.ranks.gang import Gang

    spec = spec_of({"type": method, "settings": SETTINGS[method]}, {}, 1, activationCheckpointing=kind)
    module = sharded.build(plan_of(spec), base, Gang(0, 1, 0, torch.device("cpu"), None), Unchanged()).module
    generator = torch.Generator().manual_seed(1)
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for each in trained.values():
            each.add_(torch.randn(each.shape, generator=generator), alpha=0.1)
    module(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
    return {name: each.grad for name, each in trained.items() if each.grad is not None}


def products(base: Path, kind: str) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    from finetune_trainer.ranks.gang import Gang

    spec = spec_of({"type": "LoRA", "lora": {"r": 4}}, {}, 1, activationCheckpointing=kind)
    trained = sharded.build(plan_of(spec), base, Gang(0, 1, 0, torch.device("cpu"), None), Unchanged())
    with FlopCounterMode(display=False) as counter:
        trained.module(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    return int(counter.get_total_flops())


class _PackedProducts(TorchDispatchMode):
    """How often bitsandbytes multiplied with a packed weight in a forward pass, or in what repeats one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "bitsandbytes::gemm_4bit"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "times"), [("None", 1), ("Selective", 1), ("Full", 2)])
def test_products_with_packed_weights_are_kept_like_any_other(tmp_path: Path, kind: str, times: int) -> None:
    plan = plan_of_shape("llama", is_fast=True, method="QLoRA", activationCheckpointing=kind)
    run = SmallRun(plan, write_shape(tmp_path, "llama", torch.bfloat16))
    with _PackedProducts() as seen:
        compute_gradients(run.inputs, step=0, weight=1.0)
    # Seven linear layers in each of two layers, of two micro-batches.
    assert seen.count == 7 * 2 * 2 * times
