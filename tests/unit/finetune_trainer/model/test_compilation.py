"""Layers that are compiled: once for all of them and for every batch, and to the same losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_job.plan.run_plan import FsdpPlan
from finetune_trainer.model import variable_length
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.compilation import compile_layers
from finetune_trainer.model.fused_adapters import fuse_adapters
from tests.support.tiny_model import plan_of, tiny_spec

SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12, "num_attention_heads": 4}
"""More layers than torch compiles versions of one function, after which it compiles no more."""
IDS = torch.arange(4 * 24).view(4, 24) * 7 % 264


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that torch does before it calls one: what it traces and how often. Generated code is the library's."""
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: original(layer, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def adapted() -> tuple[Any, FsdpPlan]:
    torch.manual_seed(1)
    plan = plan_of(tiny_spec(method={"type": "LoRA", "lora": {"r": 4, "loraAlpha": 6}}))
    model = attach(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)), plan)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model, plan.parallelism.fsdp


def step(model: Any, ids: torch.Tensor = IDS) -> tuple[float, torch.Tensor]:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    model.zero_grad()
    return loss.item(), found


def test_all_layers_share_their_code_and_compute_what_peft_computes() -> None:
    model, fsdp = adapted()
    loss, wanted = step(model)
    fuse_adapters(model, ())
    assert compile_layers(model, fsdp) == SIZES["num_hidden_layers"]
    compiled_loss, found = step(model)
    # One for the first, whose input needs no gradient, and one for all others.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-6


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_the_compiler_measures_nothing_if_kernels_are_pinned(is_deterministic: bool) -> None:
    assert not config.deterministic
    model, fsdp = adapted()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        compile_layers(model, fsdp)
        assert config.deterministic is is_deterministic
    finally:
        torch.use_deterministic_algorithms(before)
        config.deterministic = False


@torch.library.custom_op("finetune_test::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """One call, as a device's kernel is, of which the compiler knows the shape of the result alone."""
    bounded = {"scale": scale, "window_size": (-1, 0), "enable_gqa": False}
    return variable_length.by_document(query, key, value, bounds, bounds, longest, longest, **bounded)


@attention.register_fake
def _(query: torch.Tensor, *_others: Any) -> torch.Tensor:
    return torch.empty_like(query)


def test_other_documents_are_no_reason_to_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(query: Any, key: Any, value: Any, bounds: Any, _of_keys: Any, longest: int, _longest: int, **others: Any) -> Any:
        return attention(query, key, value, bounds, longest, others["scale"])

    monkeypatch.setattr(variable_length, "_kernel", lambda _device: kernel)
    model, fsdp = adapted()
    variable_length.install(model.get_base_model())
    compile_layers(model, fsdp)
    graphs = []
    for lengths in ([9, 15], [16, 8], [10, 4, 10], [14, 2, 2, 2, 4]):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        with torch.no_grad():
            model(
                input_ids=IDS[:1], position_ids=positions, use_cache=False,
                **variable_length.document_bounds(positions, torch.device("cpu")),
            )  # fmt: skip
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 1, 1]
    assert not counters["graph_break"]


def test_bounds_are_of_any_number_and_of_few_greatest_lengths() -> None:
    model, fsdp = adapted()
    compile_layers(model, fsdp)
    seen: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda _model, _args, kwargs: seen.append(kwargs), with_kwargs=True)
    for bounds, longest in (([0, 9, 24], 15), ([0, 16, 24], 16), ([0, 1, 24], 23)):
        ends = torch.tensor(bounds, dtype=torch.int32)
        model(
            input_ids=IDS[:1], use_cache=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest
        )
    assert [(each["max_length_q"], each["max_length_k"]) for each in seen] == [(16, 16), (16, 16), (32, 32)]
    assert all(each["cu_seq_lens_q"]._dynamo_weak_dynamic_indices == {0} for each in seen)
    model(input_ids=IDS[:1], use_cache=False)
    assert not {"cu_seq_lens_q", "max_length_q"} & set(seen[-1])
