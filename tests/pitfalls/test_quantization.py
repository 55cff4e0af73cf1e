"""Packed 4-bit weights are bytes that have to pass for numbers, and merging into them rounds again."""

import warnings
from dataclasses import replace

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from pydantic import ValidationError

from finetune_job.api.enumerations import MergeBase
from finetune_trainer.merge.quantized_base import training_quantization
from finetune_trainer.model.load import quantization_config
from finetune_trainer.weights.errors import UnsupportedBaseError
from tests.pitfalls.lab.build import adapted, load_base, sharded
from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails, trains
from tests.pitfalls.lab.models import HIDDEN
from tests.pitfalls.lab.observe import observe
from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import findings, plans

INTEGER = "fsdp1-qlora-integer-storage"
DTYPE = "fsdp1-qlora-storage-not-model-dtype"
PARAM = "qlora-storage-not-param-dtype"


def qlora(fsdp, dtype=None, **quantization):
    return findings(fsdp, dtype=dtype, type="QLoRA", quantization=quantization)


def test_bytes_cannot_be_flattened():
    fails(Case(bits=4), "shard", "ValueError: Cannot flatten integer dtype tensors")
    assert INTEGER in qlora({"version": 1}, quantStorage="uint8")


@pytest.mark.parametrize(("storage", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_storage_of_another_type_cannot_be_flattened(storage, dtype):
    fails(Case(bits=4, storage=storage, dtype=dtype), "shard", "ValueError: Must flatten tensors with uniform dtype")
    assert DTYPE in qlora({"version": 1}, dtype, quantStorage=storage)


def test_fsdp_2_shards_bytes():
    trains(Case(bits=4, version=2))
    assert set(qlora({"version": 2}, quantStorage="uint8")) == {"fsdp2-qlora-integer-storage"}
    results = run_ranks(largest_packed_shard, Case(bits=4, version=2))
    assert [result.value for result in results] == [HIDDEN * HIDDEN] * 2, results


def largest_packed_shard(rank: int, case: Case) -> int:
    """Bytes that this rank holds of the largest packed weight (of 2 HIDDEN x HIDDEN values, two to a byte, over two ranks)."""
    model = sharded(case, adapted(case, load_base(case)))
    packed = [parameter for parameter in model.parameters() if parameter.dtype is torch.uint8]
    return max(2 * parameter.to_local().numel() for parameter in packed)


@pytest.mark.parametrize("version", [1, 2])
def test_mixed_precision_destroys_packed_weights(version):
    fails(
        Case(bits=4, storage="float32", param_dtype="bfloat16", version=version),
        "forward",
        "RuntimeError: shape",
        "is invalid for input of size",
    )
    fsdp = {"version": version, "mixedPrecision": {"paramDtype": "bfloat16"}}
    # Under FSDP 1 the trainer leaves the casts to autocast, or holds all in float32; and it stores what is left open in the type
    # of the computation.
    assert (PARAM in qlora(fsdp, "float32", quantStorage="float32")) is (version == 2)
    assert PARAM not in qlora(fsdp, "float32")
    upwards = {"version": version, "mixedPrecision": {"paramDtype": "float32"}}
    assert PARAM not in qlora(upwards, "bfloat16")
    assert (PARAM in qlora(upwards, "bfloat16", quantStorage="bfloat16")) is (version == 2)


@pytest.mark.parametrize(
    ("version", "stage", "text"), [(1, "shard", "Cannot flatten integer dtype tensors"), (2, "forward", "has no attribute 'CB'")]
)
def test_an_8_bit_base_cannot_be_sharded(version, stage, text):
    """Four bits, which the fix leaves, can."""
    fails(Case(bits=8, version=version), stage, text)
    sharded_by = {"method.type": "QLoRA", "parallelism.processesPerNode": 2, "parallelism.fsdp.version": version}
    wrong, right = plans("quantization-bits", {**sharded_by, "method.quantization.bits": 8})
    assert [plan.method.quantization.bits for plan in (wrong, right) if plan.method.quantization] == [8, 4]
    trains(Case(bits=4, version=version, storage="float32" if version == 1 else None))


def test_an_8_bit_base_cannot_be_written_out():
    packed = {"method.type": "QLoRA", "method.quantization.bits": 8, "merge.base": "Dequantized"}
    wrong, right = plans("quantization-bits", packed)
    assert wrong.method.quantization is not None
    with pytest.raises(UnsupportedBaseError, match="quantized to 4 bits can be written dequantized"):
        training_quantization(wrong.method.quantization, torch.float32)
    assert right.merge.base is MergeBase.ORIGINAL


def test_no_other_number_of_bits_exists():
    """Nobody else would say so: whatever is not 8 would be loaded in 4 bits."""
    wrong, right = plans("quantization-bits", {"method.type": "QLoRA", "method.quantization.bits": 5})
    for plan in (wrong, right):
        assert plan.method.quantization is not None
        assert quantization_config(plan.method.quantization, torch.float32, torch.float32).load_in_4bit


def test_merging_into_4_bits_rounds_the_update_away():
    """The same adapter merged into packed weights and into the 16-bit ones."""
    prompt = torch.arange(16).reshape(1, 16)

    def merged_logits(case: Case) -> tuple[torch.Tensor, list[str]]:
        model = adapted(case, load_base(case))
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


def test_preparation_for_k_bits_mixes_element_types():
    bfloat16 = {"bits": 4, "storage": "bfloat16", "dtype": "bfloat16"}
    fails(Case(**bfloat16, kbit_preparation=True), "shard", "ValueError: Must flatten tensors with uniform dtype")
    trains(Case(**bfloat16))


def test_the_librarys_own_settings_are_slow_and_cannot_be_flattened():
    from transformers import BitsAndBytesConfig

    default = BitsAndBytesConfig(load_in_4bit=True)
    assert default.bnb_4bit_quant_type == "fp4"
    assert default.bnb_4bit_compute_dtype is torch.float32
    assert default.bnb_4bit_quant_storage is torch.uint8
    assert not default.bnb_4bit_use_double_quant


def test_a_misspelt_setting_is_dropped():
    from transformers import BitsAndBytesConfig

    misspelt = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage_dtype="bfloat16")
    assert misspelt.bnb_4bit_quant_storage is torch.uint8
    with pytest.raises(ValidationError, match="quantStorageDtype"):
        findings(type="QLoRA", quantization={"quantStorageDtype": "bfloat16"})


def test_an_adapter_trained_on_4_bits_means_something_else_on_the_original():
    prompt = torch.arange(16).reshape(1, 16)
    logits = []
    for case in (Case(bits=4, train_mode=False), Case(train_mode=False)):
        model = adapted(case, load_base(case)).eval()
        with torch.no_grad():
            logits.append(model(input_ids=prompt).logits)
    assert (logits[0] - logits[1]).abs().max() > 0.05


@pytest.mark.parametrize(
    "case",
    [
        Case(bits=4, version=2, evaluate_first=True),
        Case(bits=4, version=0, evaluate_first=True),
        Case(bits=4, version=2, storage="bfloat16", dtype="bfloat16", evaluate_first=True),
        Case(bits=4, storage="bfloat16", dtype="bfloat16", evaluate_first=True),
    ],
    ids=["fsdp2-bytes", "ddp-bytes", "fsdp2-bfloat16", "fsdp1-bfloat16"],
)
def test_an_evaluation_makes_later_gradients_wrong_on_a_cpu_with_the_fast_kernel(case):
    """Evaluation repacks the weights for a kernel that has no backward pass, and nothing packs them back; no error.

    Only CPUs with AVX512-BF16 have that kernel. On any other, the same case must train.
    """
    if has_avx512bf16():
        found = observe(case)
        assert not found.failed
        assert found.gradient_error is not None
        assert found.gradient_error > 0.5
    else:
        trains(case)
    trains(replace(case, evaluate_first=False))
