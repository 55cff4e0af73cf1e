"""A model of which each rank reads its own shards has the bytes of one loaded whole, and takes less memory."""

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from torch.nn import functional

from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.model import sharded
from finetune_trainer.model.load_shards import base_name
from finetune_trainer.ranks.gang import Gang, joined
from tests.support.cases import table
from tests.support.small_gang import Unchanged
from tests.support.tiny_model import plan_of, write_tiny_llama
from tests.unit.finetune_trainer.model.sharded_gang import TOKENS, gang, spec_of

QLORA = {"type": "QLoRA", "lora": {"r": 4}, "quantization": {}}
BUILT: dict[str, tuple[dict[str, Any], dict[str, Any], int, str, bool]] = table(__file__, "BUILT")


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is wrong with each, by two gangs that go through all of them."""
    directory = tmp_path_factory.mktemp("built")
    for ranks in (2, 3):
        chosen: dict[str, tuple[dict[str, Any], Path]] = {}
        for name, (method, fsdp, num_ranks, dtype, tied) in BUILT.items():
            if num_ranks == ranks:
                # No multiple of a block's 64 values, and weights whose scales fill no block of 256.
                sizes = {"hidden_size": 48, "intermediate_size": 80}
                chosen[name] = (
                    spec_of(method, fsdp, ranks),
                    write_tiny_llama(directory / name, getattr(torch, dtype), tied, **sizes),
                )
        (directory / str(ranks)).mkdir()
        gang(_build_all, ranks, directory / str(ranks), chosen)
    found: dict[str, str] = {}
    for path in directory.glob("*/wrong-*.json"):
        found |= {name: wrong for name, wrong in json.loads(path.read_text()).items() if wrong or name not in found}
    return found


@pytest.mark.parametrize("name", BUILT)
def test_a_model_loaded_by_shards_has_the_bytes_of_one_loaded_whole(differences: dict[str, str], name: str) -> None:
    assert differences[name] == ""


def _build_all(rank: int, ranks: int, store: str, out: Path, chosen: dict[str, tuple[dict[str, Any], Path]]) -> None:
    wrong = {}
    with joined(rank, ranks, rank, store) as joint:
        for name, (spec, base) in chosen.items():
            found = [_built(load, spec, base, joint) for load in (sharded.unloaded_base_model, lambda *_: None)]
            # Told in the end: a rank that fails alone leaves the others waiting.
            try:
                _compare(found, spec, base)
                wrong[name] = ""
            except AssertionError as error:
                wrong[name] = f"{type(error).__name__}: {error}"
    (out / f"wrong-{rank}.json").write_text(json.dumps(wrong))


Built = dict[str, tuple[Any, bool, torch.Tensor]]


def _built(load: Callable[..., Any], spec: dict[str, Any], base: Path, joint: Gang) -> Built:
    """Where each part begins, whether it is trained, and its values; also after two steps."""
    with patch.object(sharded, "unloaded_base_model", load):
        module = sharded.build(plan_of(spec), base, joint, Unchanged()).module
    found: Built = {
        piece.name: (piece.start, piece.holder.requires_grad, piece.parameter_values()) for piece in pieces(module, frozen=True)
    }
    found |= {f"buffer {name}": (0, False, buffer) for name, buffer in module.named_buffers()}
    found |= {name: (0, False, values) for name, values in _scales(module)}
    for values in _two_steps(module):
        found[f"trained {len(found)}"] = (0, True, values)
    return found


def _compare(found: list[Built], spec: dict[str, Any], base: Path) -> None:
    assert found[0].keys() == found[1].keys(), "other tensors"
    assert any("scales" in name for name in found[0]) is ("quantization" in spec["method"]), "scales"
    assert sharded.unloaded_base_model(plan_of(spec), base, torch.device("cpu")) is not None, "is loaded whole"
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
    assert (
        sharded.unloaded_base_model(plan_of(spec_of({**QLORA, "quantization": {"bits": 8}}, {}, 1)), base, torch.device("cpu"))
        is None
    )


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
