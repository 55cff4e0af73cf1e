"""A model of which each rank reads its own shards has the bytes of one loaded whole, and takes less memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from torch.nn import functional

from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.model import sharded
from finetune_trainer.model.load_shards import base_name
from finetune_trainer.ranks.gang import joined
from tests.support.small_gang import Unchanged
from tests.support.tiny_model import plan_of, write_tiny_llama
from tests.unit.finetune_trainer.model.sharded_gang import FLAT, FULL, LORA_TIED, TOKENS, gang, spec_of

LORA = {"type": "LoRA", "lora": {"r": 4, "modulesToSave": ["lm_head"]}}
DORA = {"type": "DoRA", "lora": {"r": 4}}


def quantised(**settings: Any) -> dict[str, Any]:
    return {"type": "QLoRA", "lora": {"r": 4}, "quantization": settings}


QLORA = quantised()
QDORA = {**QLORA, "type": "QDoRA"}
# Magnitudes follow from the adapter's matrices, too, which PEFT attaches in the type of the products.
QDORA_RANDOM = {
    **quantised(quantStorage="uint8", doubleQuant=False, quantType="fp4", computeDtype="float16"),
    "type": "QDoRA",
    "lora": {"r": 4, "initLoraWeights": "Random"},
}
BUILT: dict[str, tuple[dict[str, Any], dict[str, Any], int, torch.dtype, bool]] = {
    "lora-fsdp2": (LORA, {}, 3, torch.bfloat16, False),
    "dora-fsdp2-tied": (DORA, {}, 2, torch.bfloat16, True),
    "full-fsdp2-tied": (FULL, {}, 3, torch.bfloat16, True),
    "lora-fsdp1-tied": (LORA_TIED, FLAT, 2, torch.float32, True),
    "dora-fsdp1": (DORA, {"version": 1}, 3, torch.float32, False),
    "full-fsdp1": (FULL, {"version": 1}, 2, torch.bfloat16, False),
    "qlora-fsdp2": (QLORA, {}, 3, torch.bfloat16, False),
    "qlora-fsdp1-tied": (QLORA, {"version": 1}, 2, torch.float32, True),
    "qlora-fsdp1-original": (QLORA, FLAT, 3, torch.bfloat16, False),
    "qlora-bytes": (quantised(quantStorage="uint8", doubleQuant=False), {}, 2, torch.float16, False),
    "qdora-fsdp2": (QDORA, {}, 3, torch.bfloat16, False),
    "qdora-fsdp1-tied": (QDORA, {"version": 1}, 2, torch.float32, True),
    "qdora-fsdp1-original": (QDORA, FLAT, 2, torch.float32, False),
    "qdora-random": (QDORA_RANDOM, {}, 2, torch.bfloat16, False),
    "qlora-fp4": (quantised(quantType="fp4", computeDtype="float32"), {}, 3, torch.float32, False),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_model_loaded_by_shards_has_the_bytes_of_one_loaded_whole(tmp_path: Path, name: str) -> None:
    method, fsdp, ranks, dtype, tied = BUILT[name]
    # No multiple of a block's 64 values, and weights whose scales fill no block of 256.
    base = write_tiny_llama(tmp_path / "base", dtype, tied, hidden_size=48, intermediate_size=80)
    gang(_build_twice, ranks, tmp_path, spec_of(method, fsdp, ranks), base)


def _build_twice(rank: int, ranks: int, store: str, _: Path, spec: dict[str, Any], base: Path) -> None:
    found = []
    with joined(rank, ranks, rank, store) as joint:
        by_shard = sharded.unloaded_base_model
        for load in (by_shard, lambda *_: None):
            sharded.unloaded_base_model = load  # type: ignore[assignment]
            module = sharded.build(plan_of(spec), base, joint, Unchanged()).module
            found.append(
                {
                    piece.name: (piece.start, piece.holder.requires_grad, piece.parameter_values())
                    for piece in pieces(module, frozen=True)
                }
                | {f"buffer {name}": (0, False, buffer) for name, buffer in module.named_buffers()}
                | {name: (0, False, values) for name, values in _scales(module)}
            )
            for values in _two_steps(module):
                found[-1][f"trained {len(found[-1])}"] = (0, True, values)
    assert found[0].keys() == found[1].keys()
    assert any("scales" in name for name in found[0]) is ("quantization" in spec["method"])
    assert by_shard(plan_of(spec), base, torch.device("cpu")) is not None
    for name, (start, trained, values) in found[0].items():
        assert (start, trained) == found[1][name][:2], name
        assert values.dtype is found[1][name][2].dtype, name
        # As bytes: packed weights have some that stand for no number.
        assert torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (values, found[1][name][2]))), name


def _scales(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All that 4-bit layers unpack their weights by."""
    for number, layer in enumerate(each for each in module.modules() if getattr(each, "quant_state", None) is not None):
        state: Any = layer.quant_state
        yield from ((f"scales {number} {key}", each) for key, each in state.as_dict().items() if isinstance(each, torch.Tensor))
        told = (state.quant_type, state.blocksize, state.shape, state.dtype, state.nested, state.nested and float(state.offset))
        yield f"scales {number} {told}", state.absmax


def _two_steps(module: nn.Module) -> Iterator[torch.Tensor]:
    """Logits before a step and after it, and what is trained after two."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(2):
        logits = module(input_ids=TOKENS, use_cache=False).logits
        yield logits.detach().clone()
        torch.autograd.backward(functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()
    yield from (piece.parameter_values().clone() for piece in pieces(module))


def test_packed_layers_that_are_loaded_by_shards_are_fit_for_training(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base", attention_bias=True)
    unloaded = sharded.unloaded_base_model(plan_of(spec_of(QLORA, {}, 2)), base, torch.device("cpu"))
    assert unloaded is not None
    layers = [layer for layer in unloaded.module.modules() if isinstance(layer, Linear4bit)]
    assert len(layers) == 2 * 7
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    # Their forward passes leave biases where they are (test_packed_weights.py).
    assert (
        ["forward" in vars(layer) for layer in layers]
        == [layer.bias is not None for layer in layers]
        == [*[True] * 4, *[False] * 3] * 2
    )


def test_8_bits_are_not_loaded_by_shards(tmp_path: Path) -> None:
    """Nothing would pack them."""
    base = write_tiny_llama(tmp_path / "base")
    assert sharded.unloaded_base_model(plan_of(spec_of(quantised(bits=8), {}, 1)), base, torch.device("cpu")) is None


def test_a_rank_needs_memory_for_its_shard_and_not_for_the_model(tmp_path: Path) -> None:
    large = {"vocab_size": 4096, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 8}
    base = write_tiny_llama(tmp_path / "base", **large)
    num_bytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    gang(_measure, 2, tmp_path, spec_of({"type": "LoRA", "lora": {"r": 4}}, {}, 2), write_tiny_llama(tmp_path / "tiny"), base)
    for path in tmp_path.glob("peak-*"):
        # Half of the model, one layer and a block, where loading it whole takes all of it and the shard next to it.
        assert int(path.read_text()) < num_bytes


def _measure(rank: int, ranks: int, store: str, out: Path, spec: dict[str, Any], tiny: Path, base: Path) -> None:
    with joined(rank, ranks, rank, store) as joint:
        # What libraries allocate once is there before it is measured.
        sharded.build(plan_of(spec), tiny, joint, Unchanged())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trained = sharded.build(plan_of(spec), base, joint, Unchanged())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert trained.pieces
    (out / f"peak-{rank}").write_text(str(peak * 1024))


def test_the_base_models_name_of_a_parameter_inside_peft() -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj."
    assert base_name(f"{prefix}base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"
    assert base_name("base_model.model.lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert base_name("model.norm.weight") == "model.norm.weight"
    assert base_name(f"{prefix}lora_A.default.weight") == "model.layers.0.self_attn.q_proj.lora_A.weight"
