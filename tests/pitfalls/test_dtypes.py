"""FSDP 1 lays a unit into one flat parameter, which has one element type."""

import pytest
import torch

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails, trains
from tests.pitfalls.manifests import findings

ADAPTER = "fsdp1-adapter-dtype"
COMPUTE = "fsdp1-qlora-compute-dtype"
UNIFORM = "ValueError: Must flatten tensors with uniform dtype"
LAYERS = {"version": 1, "useOrigParams": True, "peftWrapPolicy": False}


def test_float32_adapters_in_16_bit_layers_fail():
    fails(Case(dtype="bfloat16", policy="transformer", use_orig_params=True), "shard", UNIFORM)
    assert ADAPTER in findings(LAYERS, type="LoRA", dtype="bfloat16", lora={"autocastAdapterDtype": True})
    fails(Case(adapter={"use_dora": True}, dtype="bfloat16", policy="transformer", use_orig_params=True), "shard", UNIFORM)
    assert ADAPTER in findings(LAYERS, type="DoRA", dtype="bfloat16")


def test_adapters_of_a_4_bit_base_take_its_compute_type():
    case = {
        "bits": 4,
        "storage": "bfloat16",
        "dtype": "bfloat16",
        "policy": "transformer",
        "use_orig_params": True,
        "autocast": False,
    }
    lora = {"autocastAdapterDtype": False}
    fails(Case(**case, compute="float32"), "shard", UNIFORM)
    assert COMPUTE in findings(LAYERS, type="QLoRA", dtype="bfloat16", lora=lora, quantization={"computeDtype": "float32"})
    trains(Case(**case, compute="bfloat16"))
    assert COMPUTE not in findings(LAYERS, type="QLoRA", dtype="bfloat16", lora=lora, quantization={"computeDtype": "bfloat16"})


def test_biases_are_trained_in_the_bases_type_under_fsdp_2():
    """PEFT's own way. Our trainer holds what is trained in float32, and computes in the base's type."""
    biases = {"version": 2, "config": {"attention_bias": True}, "adapter": {"bias": "all"}}
    fails(Case(dtype="bfloat16", **biases), "forward", "FSDP expects uniform original parameter dtype")
    trains(Case(dtype="bfloat16", **biases, autocast=False))
    trains(Case(**biases))


def test_modules_saved_whole_keep_the_bases_type_under_fsdp_2():
    """Adapters are made float32, modules that are trained whole are not; mixed precision changes nothing in that."""
    norms = {"version": 2, "adapter": {"modules_to_save": ["input_layernorm"]}}
    for param_dtype in (None, "bfloat16"):
        fails(
            Case(dtype="bfloat16", param_dtype=param_dtype, **norms), "forward", "FSDP expects uniform original parameter dtype"
        )
    trains(Case(dtype="bfloat16", autocast=False, **norms))
    trains(Case(**norms))


@pytest.mark.parametrize(("dtype", "moves"), [(torch.bfloat16, False), (torch.float32, True)])
def test_norms_saved_whole_stand_still_in_16_bits(dtype, moves):
    """A weight of 1 in bfloat16 has neighbours 1/128 above and 1/256 below it; usual updates are a hundredth of that."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0)
    for _ in range(5):
        weight.grad = torch.full_like(weight, 0.1)
        optimizer.step()
    assert bool((weight != 1).any()) is moves
    found = findings(
        {}, type="LoRA", dtype=str(dtype).removeprefix("torch."), lora={"modulesToSave": ["norm"], "autocastAdapterDtype": False}
    )
    assert ("saved-module-16-bit" in found) is not moves
