"""What a compiled layer keeps for its backward pass: bytes of real layers, split by the rules of the compiler, as predicted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_job.api.inputs import Attention
from finetune_job.plan.element_types import resolve_elements
from finetune_memory.activations import TrainingPass, layer_activations
from finetune_memory.adapters import trained_parameters
from finetune_memory.estimate import estimate
from finetune_memory.families import base_parameters
from finetune_memory.layers import read_layers
from finetune_memory.model_shape import ModelShape, Workload, facts_of
from finetune_trainer.model import variable_length
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.compilation import compile_layers
from finetune_trainer.model.fused_adapters import fuse_adapters
from tests.support.cases import table
from tests.support.tiny_model import fused, plan_of, tiny_spec
from tests.unit.finetune_memory.configs import CONFIGS

TOKENS = 512
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@torch.library.custom_op("finetune_test::documents", mutates_args=())
def documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call, as a device's kernel is; it also gives the logarithms of the sums, which its backward pass needs."""
    how: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
    found = variable_length.by_document(query, key, value, bounds, bounds, longest, longest, **how)
    return found.clone(), torch.zeros(query.shape[1], query.shape[0])


@documents.register_fake
def _(query: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])


@torch.library.custom_op("finetune_test::documents_backward", mutates_args=())
def documents_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, result: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What it reads is what counts here, not what it gives."""
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@documents_backward.register_fake
def _(
    _gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_others: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)


def _backward(context: Any, gradient: torch.Tensor, _of_sums: torch.Tensor) -> tuple[Any, ...]:
    return (*documents_backward(gradient, *context.saved_tensors), None, None, None)


documents.register_autograd(_backward, setup_context=_keep)


def kernel(query: Any, key: Any, value: Any, bounds: Any, _of_keys: Any, longest: int, _longest: int, **others: Any) -> Any:
    return documents(query, key, value, bounds, longest, others["scale"])[0]


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that the compiler does before it makes code: also what to keep and what to compute again."""
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer: original(layer, backend="aot_eager_decomp_partition"))
    monkeypatch.setattr(variable_length, "_kernel", lambda _device: kernel)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config_of(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **SIZES}


def plan_with(lora: dict[str, Any]) -> Any:
    training = {"compile": True, "precision": "bf16"}
    return fused(plan_of(tiny_spec(method={"type": "LoRA", "lora": {"r": 16, **lora}}, training=training)))


def kept_by_the_second_layer(kind: str, lora: dict[str, Any]) -> int:
    """Bytes of what is as long as the batch. Nothing is kept before the first adapter, so the first layer is another."""
    torch.manual_seed(1)
    plan, config = plan_with(lora), AutoConfig.for_model(kind, **SIZES)
    model = attach(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), plan)
    assert isinstance(model, PeftModel)
    fuse_adapters(model, ())
    variable_length.install(model.get_base_model())
    assert compile_layers(model, plan.parallelism.fsdp) == SIZES["num_hidden_layers"]
    kept: dict[int, int] = {}
    marks: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if TOKENS in tensor.shape:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    inner = model.get_base_model().model
    for layer in inner.layers:
        layer.register_forward_pre_hook(lambda *_: marks.append(len(kept)))
    ids, positions = torch.arange(TOKENS)[None] % 264, torch.arange(TOKENS)[None] % (TOKENS // 2)
    bounds = variable_length.document_bounds(positions, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", dtype=torch.bfloat16):
        inner(input_ids=ids, position_ids=positions, use_cache=False, **bounds)
    return sum(list(kept.values())[marks[1] : marks[2]])


def predicted(kind: str, lora: dict[str, Any]) -> int:
    plan, config = plan_with(lora), config_of(kind)
    elements = resolve_elements(plan, "bfloat16")
    base = base_parameters(config, elements.load)
    shape = ModelShape(trained_parameters(base, plan.method, elements.load, kind), (), facts_of(config))
    work = Workload(1, TOKENS, has_mask=False, on_gpu=True)
    during = TrainingPass(shape.facts, work, elements, Attention.VARLEN, 0.0, fuses_adapters=True, is_compiled=True)
    return layer_activations(read_layers(shape)[1], during, is_first=False).kept


@pytest.mark.parametrize(
    ("kind", "lora", "tolerance"),
    [
        pytest.param(*row, marks=pytest.mark.nightly if number else ())
        for number, row in enumerate(table(__file__, "test_a_compiled_layer_keeps_what_is_predicted"))
    ],
    ids=["llama", "two projections", "qwen2", "qwen3", "starcoder2", "phi3", "olmo2", "glm4"],
)
def test_a_compiled_layer_keeps_what_is_predicted(kind: str, lora: dict[str, Any], tolerance: float) -> None:
    measured = kept_by_the_second_layer(kind, lora)
    assert predicted(kind, lora) == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize(("compiles", "measured"), [(False, 67.65e9), (True, 55.9e9)])
def test_an_8b_lora_takes_what_it_took_on_an_h200(compiles: bool, measured: float) -> None:
    """Peaks of torch's allocator, 2 x 4,096 packed tokens (bench/results/gpu/speed.json)."""
    config = CONFIGS["Llama-3.1-8B"]
    training = {"compile": compiles, "precision": "bf16", "microBatchSize": 2, "globalBatchSize": 2, "maxSteps": 1}
    method, alone = {"type": "LoRA", "lora": {"r": 16}}, {"processesPerNode": 1}
    spec = tiny_spec(model={"attention": "varlen"}, method=method, training=training, parallelism=alone)
    plan = fused(plan_of(spec))
    elements = resolve_elements(plan, "bfloat16")
    parameters = trained_parameters(base_parameters(config, elements.load), plan.method, elements.load, "llama")
    work = Workload(2, 4096, has_mask=False, on_gpu=True)
    found = estimate(plan, ModelShape(parameters, (), facts_of(config)), elements, work)
    allocated = sum(term.bytes for term in found.terms if term.name not in {"allocator slack", "CUDA context"})
    assert allocated == pytest.approx(measured, rel=0.01)
