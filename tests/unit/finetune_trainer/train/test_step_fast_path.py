"""All parts of the fast path together against none of them: losses and gradients of a step, for the five architectures.

Fast: attention by the bounds of documents, LoRA in the type of its base with its sum in one product, layers compiled. Reference:
a mask, PEFT's own forward pass, nothing compiled. The compiler stops before it generates code, which would take a minute.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig

from finetune_job.api.inputs import Attention
from finetune_memory.choices import varlen_problem
from finetune_memory.model_shape import facts_of
from finetune_trainer.errors import ConfigError
from finetune_trainer.model import variable_length
from finetune_trainer.train.step import compute_gradients
from tests.support.shapes import SHAPES, SmallRun, plan_of_shape, write_shape
from tests.unit.finetune_trainer.train.recorded_steps import distance

KINDS = ["llama", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("qwen3", "gemma2", "mixtral", "gpt2"))]
FIT_FOR_VARLEN = {"llama", "qwen3", "mixtral", "gpt2"}
ROUNDING = 2**-8
"""Of bfloat16, relative: half a unit of the last of 8 bits."""


@pytest.fixture(autouse=True)
def without_code_generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: original(layer, backend="aot_eager"))
    # What stands for the kernel reads the bounds, which is new code for each batch.
    monkeypatch.setattr(variable_length, "by_document", torch.compiler.disable(variable_length.by_document))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def gradients(
    base: Path, kind: str, *, is_fast: bool, precision: str, is_compiled: bool = False, **method: str
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of two micro-batches."""
    run = SmallRun(plan_of_shape(kind, is_fast=is_fast, compile=is_compiled, precision=precision, **method), base)
    assert variable_length.is_installed(run.model) is (is_fast and kind in FIT_FOR_VARLEN)
    losses = compute_gradients(run.inputs, step=0, weight=1 / 64).losses
    found = {name: each.grad.float() for name, each in run.model.named_parameters() if each.grad is not None}
    assert bool(counters["stats"]["unique_graphs"]) is is_compiled
    return float(losses.sum()), found


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_the_fast_path_computes_what_the_reference_does(tmp_path: Path, kind: str) -> None:
    base = write_shape(tmp_path, kind)
    loss, wanted = gradients(base, kind, is_fast=False, precision="fp32")
    fast_loss, found = gradients(base, kind, is_fast=True, precision="fp32", is_compiled=True)
    assert fast_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert distance(gradient, wanted[name]) <= 1e-6, name


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_it_is_as_near_to_float32_as_the_reference(tmp_path: Path, kind: str) -> None:
    """Of the same weights. Each gradient may be half as far again as the reference's, and by a quarter of a unit more."""
    base = write_shape(tmp_path, kind, torch.bfloat16)
    exact_loss, exact = gradients(base, kind, is_fast=False, precision="fp32")
    loss, narrow = gradients(base, kind, is_fast=False, precision="bf16")
    fast_loss, found = gradients(base, kind, is_fast=True, precision="bf16")
    assert fast_loss == pytest.approx(exact_loss, rel=max(ROUNDING, 1.5 * abs(loss / exact_loss - 1)))
    assert found.keys() == exact.keys()
    for name, gradient in found.items():
        assert distance(gradient, exact[name]) <= 1.5 * distance(narrow[name], exact[name]) + ROUNDING / 2, name


OTHERS = pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(method, marks=pytest.mark.nightly) for method in ({"dropout": "0.25"}, {"method": "QLoRA"})),
        {"method": "QLoRA", "dropout": "0.25"},
    ],
    ids=str,
)
"""LoRA with dropout, which draws the same numbers either way, and on a base of 4 bits."""


@OTHERS
def test_so_it_does_with_dropout_and_on_a_packed_base(tmp_path: Path, method: dict[str, str]) -> None:
    base = write_shape(tmp_path, "llama")
    loss, wanted = gradients(base, "llama", is_fast=False, precision="fp32", **method)
    fast_loss, found = gradients(base, "llama", is_fast=True, precision="fp32", is_compiled=True, **method)
    assert fast_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert distance(gradient, wanted[name]) <= 1e-6, name


@OTHERS
def test_in_bfloat16_too(tmp_path: Path, method: dict[str, str]) -> None:
    base = write_shape(tmp_path, "llama", torch.bfloat16)
    exact_loss, exact = gradients(base, "llama", is_fast=False, precision="fp32", **method)
    loss, narrow = gradients(base, "llama", is_fast=False, precision="bf16", **method)
    fast_loss, found = gradients(base, "llama", is_fast=True, precision="bf16", **method)
    assert fast_loss == pytest.approx(exact_loss, rel=max(ROUNDING, 1.5 * abs(loss / exact_loss - 1)))
    for name, gradient in found.items():
        assert distance(gradient, exact[name]) <= 1.5 * distance(narrow[name], exact[name]) + ROUNDING / 2, name


@pytest.mark.parametrize("method", [{}, {"method": "QLoRA", "dropout": "0.25"}], ids=str)
@pytest.mark.parametrize("again", ["Selective", "Full"])
def test_what_is_computed_again_has_the_same_bits(tmp_path: Path, method: dict[str, str], again: str) -> None:
    base = write_shape(tmp_path, "llama", torch.bfloat16)
    found = []
    for kind in ("None", again):
        run = SmallRun(plan_of_shape("llama", is_fast=True, activationCheckpointing=kind, **method), base)
        compute_gradients(run.inputs, step=0, weight=1 / 64)
        found.append({name: each.grad for name, each in run.model.named_parameters() if each.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_gemma_2_takes_a_mask_because_attention_by_bounds_is_refused(tmp_path: Path) -> None:
    plan = plan_of_shape("gemma2", is_fast=True)
    config = AutoConfig.for_model("gemma2", **SHAPES["gemma2"]).to_dict()
    # transformers has none that caps scores, so that its plain attention is taken.
    reason = "transformers has no fused attention for this architecture"
    assert varlen_problem(plan, facts_of(config, has_fused_attention=False), "bfloat16") == reason
    capped = facts_of(config, has_fused_attention=True)
    assert varlen_problem(plan, capped, "bfloat16") == "the model caps its attention scores"
    base = write_shape(tmp_path, "gemma2")
    run = SmallRun(plan, base)
    assert run.model.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="varlen does not support Gemma2Attention, which caps its attention scores"):
        SmallRun(plan.with_attention(Attention.VARLEN), base).step(0)
