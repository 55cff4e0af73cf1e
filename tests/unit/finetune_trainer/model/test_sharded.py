"""How the model is built changes nothing of what it is: loaded shard by shard, compiled, or recomputing its activations."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from finetune_job.api.inputs import Attention
from finetune_job.plan.run_plan import Choice
from finetune_trainer.errors import ConfigError
from finetune_trainer.model import sharded, variable_length
from finetune_trainer.ranks.gang import Gang, joined
from tests.support.small_gang import Unchanged
from tests.support.tiny_model import plan_of, write_tiny_llama
from tests.unit.finetune_trainer.model.sharded_gang import (
    FLAT,
    FULL,
    LORA_TIED,
    TOKENS,
    computed,
    gang,
    losses_and_gradients,
    spec_of,
)

ATTENTION = "spec.model.attention"
ORDER = (
    *("load", "name frozen parameters", "attach adapters", "fuse adapters", "checkpoint activations", "read small tensors"),
    *("start from first values", "install attention", "install objective", "check", "keep fixed tensors", "cast embeddings"),
    *("compile", "choose packed layers", "shard", "fill shards"),
)


@pytest.mark.parametrize(
    ("problem", "chosen", "installed"), [("", True, True), ("", False, True), ("T4", True, False), ("T4", False, None)]
)
def test_a_device_without_the_kernels_has_a_mask_unless_the_user_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, problem: str, chosen: bool, installed: bool | None
) -> None:
    monkeypatch.setattr(variable_length, "device_problem", lambda *_: problem)
    plan = plan_of(spec_of({"type": "LoRA", "lora": {"r": 4}}, {}, 1)).with_attention(Attention.VARLEN)
    choices = [each for each in plan.choices if each.field != ATTENTION]
    if chosen:
        choices.append(Choice(field=ATTENTION, value="varlen", reason="needs no mask"))
    plan = plan.model_copy(update={"choices": tuple(choices)})
    base = write_tiny_llama(tmp_path / "base")

    def built() -> nn.Module:
        return sharded.build(plan, base, Gang(0, 1, 0, torch.device("cpu"), None), Unchanged()).module

    if installed is None:
        with pytest.raises(ConfigError, match=f"{ATTENTION}: varlen: T4"):
            built()
        return
    assert variable_length.is_installed(built()) is installed
    assert ("sdpa in place of varlen, because T4" in caplog.text) is not installed


@pytest.mark.parametrize(
    ("method", "left_out"),
    [
        ({"type": "LoRA", "lora": {"r": 4}}, {"name frozen parameters", "fuse adapters"}),
        (FULL, {"attach adapters", "fuse adapters"}),
        ({"type": "QLoRA", "lora": {"r": 4}}, {"name frozen parameters", "fuse adapters"}),
    ],
    ids=["lora", "full", "qlora"],
)
def test_the_steps_of_a_single_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], left_out: set[str]
) -> None:
    done: list[str] = []

    def recorded(step: sharded.BuildStep) -> sharded.BuildStep:
        def run(draft: sharded.Draft) -> None:
            done.append(step.name)
            step.run(draft)

        return replace(step, run=run)

    monkeypatch.setattr(sharded, "STEPS", tuple(map(recorded, sharded.STEPS)))
    plan = plan_of(spec_of(method, {}, 1))
    sharded.build(plan, write_tiny_llama(tmp_path / "base"), Gang(0, 1, 0, torch.device("cpu"), None), Unchanged())
    # A single rank loads the base as a whole; no such job has first values, or varlen or a compiler without being asked.
    left_out |= {"read small tensors", "choose packed layers", "fill shards"}
    left_out |= {"start from first values", "install attention", "compile"}
    assert done == [name for name in ORDER if name not in left_out]


NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler, and none is installed"
)


@pytest.mark.parametrize(
    ("method", "held"),
    [
        ({"type": "LoRA", "lora": {"r": 4, "trainableTokenIndices": [3, 5]}}, torch.bfloat16),
        ({"type": "QLoRA", "lora": {"r": 4}}, torch.bfloat16),
        (FULL, torch.float32),
    ],
    ids=["rows", "qlora", "full"],
)
def test_one_rank_holds_a_frozen_base_in_the_16_bit_type_of_the_computation(
    tmp_path: Path, method: dict[str, Any], held: torch.dtype
) -> None:
    base = write_tiny_llama(tmp_path / "base", torch.float16)
    plan = plan_of(spec_of(method, {}, 1, precision="bf16"))
    trained = sharded.build(plan, base, Gang(0, 1, 0, torch.device("cpu"), None), Unchanged())
    assert trained.autocast is torch.bfloat16
    assert {parameter.dtype for name, parameter in trained.module.named_parameters() if "norm" in name} == {held}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = trained.module(input_ids=TOKENS, use_cache=False).logits
    functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten()).backward()
    gradients = [parameter.grad for parameter in trained.module.parameters() if parameter.requires_grad]
    assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)
    assert any(gradient is not None and bool(gradient.ne(0).any()) for gradient in gradients)


def traced(*arguments: Any) -> None:
    """With a backend that runs what was traced without making kernels of it, which takes most of the time."""
    compiled: list[str] = []

    def compile_traced(layer: nn.Module) -> None:
        compiled.append(type(layer).__name__)
        layer._compiled_call_impl = torch.compile(layer._call_impl, backend="aot_eager")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", compile_traced)
        losses_and_gradients(*arguments)
    assert compiled == ["LlamaDecoderLayer"] * 2


@pytest.mark.parametrize(
    "body", [traced, pytest.param(losses_and_gradients, marks=[pytest.mark.nightly, NEEDS_COMPILER])], ids=["traced", "kernels"]
)
def test_compiled_layers_give_the_same_loss_and_gradients(tmp_path: Path, body: Callable[..., None]) -> None:
    base = write_tiny_llama(tmp_path / "base")
    expected = computed(tmp_path / "plain", base, LORA_TIED, {})
    found = computed(tmp_path / "compiled", base, LORA_TIED, {}, body=body, compile=True)
    for (loss, gradients), (expected_loss, expected_gradients) in zip(found, expected, strict=True):
        assert torch.allclose(loss, expected_loss, rtol=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        for name, values in expected_gradients.items():
            assert torch.allclose(gradients[name], values, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("fsdp", [{"version": 1}, FLAT, {}])
def test_the_first_pass_of_a_process_is_as_any_other(tmp_path: Path, fsdp: dict[str, Any]) -> None:
    """FSDP 1 leaves other element types behind than it finds, and dropout rounds in the type that it is given."""
    base = write_tiny_llama(tmp_path / "base", torch.bfloat16)
    method = {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}}
    gang(_same_pass_twice, 2, tmp_path, spec_of(method, {**fsdp, "mixedPrecision": {"paramDtype": "bfloat16"}}, 2), base)


def _same_pass_twice(rank: int, ranks: int, store: str, _: Path, spec: dict[str, Any], base: Path) -> None:
    with joined(rank, ranks, rank, store) as joint:
        model = sharded.build(plan_of(spec), base, joint, Unchanged())
        with torch.no_grad():
            for piece in model.pieces:
                if "lora_B" in piece.name:
                    piece.parameter_values().normal_(generator=torch.Generator().manual_seed(3))
        found = []
        for _step in range(2):
            torch.manual_seed(7)
            with torch.autocast("cpu", dtype=model.autocast) if model.autocast else nullcontext():
                logits = model.module(input_ids=TOKENS, use_cache=False).logits.float()
            logits.square().mean().backward()
            found.append(logits.detach())
    assert torch.equal(*found)
