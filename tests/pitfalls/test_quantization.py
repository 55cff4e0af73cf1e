"""Packed 4-bit weights are bytes that have to pass for numbers, and merging into them rounds again."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.pitfalls.cases import HIDDEN, Case, adapted, load_base, sharded
from tests.pitfalls.manifests import findings
from tests.pitfalls.ranks import run_ranks

INTEGER = "fsdp1-qlora-integer-storage"
DTYPE = "fsdp1-qlora-storage-not-model-dtype"
PARAM = "qlora-storage-not-param-dtype"


def qlora(fsdp, dtype=None, **quantization):
    return findings(fsdp, dtype=dtype, type="QLoRA", quantization=quantization)


def test_bytes_cannot_be_flattened(fails):
    fails(Case(bits=4), "ValueError: Cannot flatten integer dtype tensors")
    assert INTEGER in qlora({"version": 1}, quantStorage="uint8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_storage_of_the_models_type_trains(learns, dtype):
    learns(Case(bits=4, storage=dtype, dtype=dtype))
    assert not {INTEGER, DTYPE} & qlora({"version": 1}, dtype, quantStorage=dtype)
    assert not {INTEGER, DTYPE} & qlora({"version": 1}, dtype)


@pytest.mark.parametrize(("storage", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_storage_of_another_type_cannot_be_flattened(fails, storage, dtype):
    fails(Case(bits=4, storage=storage, dtype=dtype), "ValueError: Must flatten tensors with uniform dtype")
    assert DTYPE in qlora({"version": 1}, dtype, quantStorage=storage)


def test_fsdp_2_takes_storage_of_another_type(learns):
    learns(Case(bits=4, storage="bfloat16", version=2))
    assert DTYPE not in qlora({"version": 2}, "float32", quantStorage="bfloat16")


def test_fsdp_2_shards_bytes(learns, base, tmp_path):
    learns(Case(bits=4, version=2))
    assert set(qlora({"version": 2}, quantStorage="uint8")) == {"fsdp2-qlora-integer-storage"}
    results = run_ranks(largest_packed_shard, str(base), directory=tmp_path)
    assert [result.value for result in results] == [HIDDEN * HIDDEN] * 2, results


def largest_packed_shard(rank: int, base: str) -> int:
    """Bytes that this rank holds of the largest packed weight (of 2 HIDDEN x HIDDEN values, two to a byte, over two ranks)."""
    case = Case(bits=4, version=2)
    model = sharded(case, adapted(case, load_base(case, base)))
    packed = [parameter for parameter in model.parameters() if parameter.dtype is torch.uint8]
    return max(2 * parameter.to_local().numel() for parameter in packed)


@pytest.mark.parametrize("version", [1, 2])
def test_mixed_precision_destroys_packed_weights(fails, version):
    fails(
        Case(bits=4, storage="float32", param_dtype="bfloat16", version=version),
        "RuntimeError: shape",
        "is invalid for input of size",
    )
    fsdp = {"version": version, "mixedPrecision": {"paramDtype": "bfloat16"}}
    assert PARAM in qlora(fsdp, "float32", quantStorage="float32")
    assert PARAM in qlora(fsdp, "float32")


def test_mixed_precision_of_the_storage_type_trains(learns):
    learns(Case(bits=4, storage="bfloat16", dtype="bfloat16", param_dtype="bfloat16", version=2))
    assert PARAM not in qlora({"version": 2, "mixedPrecision": {"paramDtype": "bfloat16"}}, "bfloat16", quantStorage="bfloat16")


@pytest.mark.parametrize(("version", "text"), [(1, "Cannot flatten integer dtype tensors"), (2, "has no attribute 'CB'")])
def test_an_8_bit_base_cannot_be_sharded(fails, version, text):
    fails(Case(bits=8, version=version), text)
    assert "quantization-bits" in qlora({"version": version}, bits=8)
    assert "quantization-bits" not in qlora({"version": version}, bits=4)


def test_merging_into_4_bits_rounds_the_update_away(base):
    """The same adapter merged into packed weights and into the 16-bit ones."""
    prompt = torch.arange(16).reshape(1, 16)

    def merged_logits(case: Case) -> tuple[torch.Tensor, list[str]]:
        model = adapted(case, load_base(case, base))
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        model.eval()
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            apart = model(input_ids=prompt).logits
            together = model.merge_and_unload()(input_ids=prompt).logits
        return together - apart, [str(warning.message) for warning in caught]

    packed_error, said = merged_logits(Case(bits=4))
    original_error, _ = merged_logits(Case())
    assert any("Merge lora module to 4-bit linear may get different generations due to rounding errors" in text for text in said)
    assert packed_error.abs().max() > 1000 * original_error.abs().max()
    assert "merge-into-quantized" in findings(merge_base="Quantized", type="QLoRA")
    assert "merge-into-quantized" not in findings(type="QLoRA")
