"""A weight that is packed piece by piece, and sent as one tensor of bytes, is what bitsandbytes packs whole."""

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune_trainer.errors import ConfigError
from finetune_trainer.model import pack_shards
from finetune_trainer.model.pack_shards import OpenMagnitude, PackedLayer, PackedWeight, fill_packed, packed_layers
from finetune_trainer.weights.headers import read_checkpoint

CPU = torch.device("cpu")


def layer_of(directory: Path, weight: torch.Tensor, code: str, nested: bool, turned: bool = False) -> PackedLayer:
    save_file({"weight": weight}, directory / "model.safetensors")
    module = SimpleNamespace()
    return PackedLayer(module, read_checkpoint(directory).tensors["weight"], turned, code, nested, torch.bfloat16)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("code", ["nf4", "fp4"])
@pytest.mark.parametrize(("rows", "columns"), [(640, 40), (20, 30), (64, 6)])
def test_the_bits_of_a_weight_packed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool, code: str, rows: int, columns: int
) -> None:
    monkeypatch.setattr(pack_shards, "PIECE_VALUES", 192)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 5
    layer = layer_of(tmp_path, weight, code, nested)
    expected, state = functional.quantize_4bit(
        weight.bfloat16(), blocksize=64, compress_statistics=nested, quant_type=code, quant_storage=torch.uint8
    )
    made, sent = PackedWeight(layer, CPU), PackedWeight(layer, CPU)
    made.pack()
    sent.bytes.copy_(made.bytes)
    for packed in (made, sent):
        assert torch.equal(packed.codes, expected.view(-1))
        found = packed.state()
        assert (found.shape, found.dtype, found.blocksize, found.quant_type) == ((rows, columns), torch.bfloat16, 64, code)
        assert torch.equal(found.absmax, state.absmax)
        assert torch.equal(found.code, state.code)
        assert found.nested is nested
        if nested:
            assert torch.equal(found.offset, state.offset)
            assert torch.equal(found.state2.absmax, state.state2.absmax)
            assert torch.equal(found.state2.code, state.state2.code)
            assert found.state2.blocksize == 256
        assert torch.equal(
            functional.dequantize_4bit(packed.codes.view(-1, 1), found), functional.dequantize_4bit(expected, state)
        )


def test_a_weight_that_is_stored_the_other_way_round_is_turned_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_shards, "PIECE_VALUES", 64)
    weight = torch.randn(24, 36, generator=torch.Generator().manual_seed(4))
    layer = layer_of(tmp_path, weight, "nf4", nested=True, turned=True)
    factors = torch.ones(1, 24).bfloat16(), torch.arange(36.0).view(36, 1).bfloat16()
    packed = PackedWeight(replace(layer, magnitude=OpenMagnitude("up", *factors, 0.5)), CPU)
    packed.pack()
    expected, state = functional.quantize_4bit(
        weight.bfloat16().T.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    assert torch.equal(packed.codes, expected.view(-1))
    assert packed.state().shape == state.shape == (36, 24)
    # Each of the 36 rows in which the layer computes, with half its number added to each value.
    rows = functional.dequantize_4bit(expected, state) + (torch.arange(36.0).view(36, 1) * 0.5).bfloat16()
    assert torch.equal(packed.norms, torch.linalg.norm(rows, dim=1).float())


def test_what_is_kept_of_a_weight_holds_nothing_of_its_codes(tmp_path: Path) -> None:
    packed = PackedWeight(layer_of(tmp_path, torch.randn(64, 64), "nf4", nested=True), CPU)
    packed.pack()
    state = packed.state()
    kept = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    # A byte for each 64 of 4,096 values, 16 and 256 of a code book, the mean, and one scale of scales.
    assert [each.untyped_storage().nbytes() for each in kept] == [64, 64, 4, 4, 1024]


@pytest.mark.parametrize("row", [0.0, 1e-12])
def test_a_row_without_a_norm_is_refused_when_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: float) -> None:
    """DoRA would divide by it. What is far below its neighbours in a block of 64 is zero once it is packed."""
    monkeypatch.setattr(pack_shards.dist, "broadcast", lambda *_, **__: None)
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    weight[2] = row
    magnitude = OpenMagnitude("base_model.model.up", torch.randn(2, 32), torch.zeros(4, 2), 2.0)
    layer = replace(layer_of(tmp_path, weight, "nf4", nested=True), magnitude=magnitude)
    gang: Any = SimpleNamespace(rank=0, world_size=1, device=CPU)
    with pytest.raises(ConfigError, match=r"the weight of up has a row of zeros \(number 2\)"):
        fill_packed({"up.weight": layer}, [], gang)


@pytest.mark.parametrize(("rank", "world_size", "most"), [(0, 1, 1), (0, 2, 2), (1, 2, 2)])
def test_a_rank_has_two_packed_weights_in_memory_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, most: int
) -> None:
    """The one that comes, and the rank's own before and after its turn."""
    alive: weakref.WeakSet[PackedWeight] = weakref.WeakSet()
    counts: list[int] = []

    class Counted(PackedWeight):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            alive.add(self)

    monkeypatch.setattr(pack_shards, "PackedWeight", Counted)
    monkeypatch.setattr(pack_shards.dist, "broadcast", lambda *_, **__: counts.append(len(alive)))
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(6))
    layers = {f"{number}.weight": layer_of(tmp_path, weight, "nf4", nested=False) for number in range(8)}
    # Of none of them this rank keeps a part.
    pieces: Any = [SimpleNamespace(name=name, start=0, stop=0) for name in layers]
    gang: Any = SimpleNamespace(rank=rank, world_size=world_size, device=CPU)
    fill_packed(layers, pieces, gang)
    assert len(counts) == 8
    assert max(counts) <= most
    assert all(layer.module.quant_state.shape == (4, 32) for layer in layers.values())
    assert not alive


def test_layers_are_found_by_the_names_of_their_weights_in_one_order(tmp_path: Path) -> None:
    save_file({f"{name}.weight": torch.zeros(8, 16) for name in "ba"}, tmp_path / "model.safetensors")
    model = nn.Module()
    for name, source in (("b", nn.Linear), ("a", Conv1D)):
        layer = Linear4bit(16, 8, bias=False, quant_type=f"{'nf4' if name == 'a' else 'fp4'}", compress_statistics=name == "a")
        layer.source_cls = source
        model.add_module(name, layer)
    model.add_module("norm", nn.LayerNorm(8))
    found = packed_layers(model, read_checkpoint(tmp_path).tensors, torch.float16)
    assert list(found) == ["a.weight", "b.weight"]
    assert [(each.is_transposed, each.quant_type, each.is_nested) for each in found.values()] == [
        (True, "nf4", True),
        (False, "fp4", False),
    ]
    assert [each.shape for each in found.values()] == [(16, 8), (8, 16)]
    assert {each.loaded for each in found.values()} == {torch.float16}
