"""DoRA reads weights of several units at once."""

import pytest
import torch

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails, trains
from tests.pitfalls.lab.observe import observe
from tests.pitfalls.manifests import findings, plans

ORIG_PARAMS = "fsdp1-dora-orig-params"
DORA = {"use_dora": True}


def test_original_parameters_in_leaf_units_fail():
    fails(Case(adapter=DORA, policy="peft", use_orig_params=True), "forward", "IndexError", "tuple index out of range")
    assert ORIG_PARAMS in findings({"version": 1, "useOrigParams": True, "peftWrapPolicy": True}, type="DoRA")


def test_one_rank_hides_the_failure():
    trains(Case(adapter=DORA, policy="peft", use_orig_params=True, world_size=1))


def test_adapter_attached_after_sharding_fails():
    """Why the trainer attaches adapters first: magnitudes are norms of whole weights, which a shard does not have."""
    fails(Case(adapter=DORA, attach_after_wrapping=True), "adapt", "Error")
    fails(Case(attach_after_wrapping=True), "backward", "does not require grad")


@pytest.mark.parametrize("version", [1, 2])
def test_a_packed_base_trains_like_the_unpacked_one(version):
    """FSDP takes the weight's class, by which PEFT knows it as packed; bitsandbytes' layer, called first, gives it back."""
    trains(Case(adapter=DORA, bits=4, storage="float32", version=version))
    assert not findings({"version": version}, type="QDoRA", dtype="float32")


def test_norms_of_an_8_bit_base_lose_its_scales():
    """On a CPU, where one rank trains LoRA on 8 bits."""
    alone = {"world_size": 1, "version": None}
    fails(Case(adapter=DORA, bits=8, **alone), "forward", "AttributeError", "'NoneType' object has no attribute 'unsqueeze'")
    assert observe(Case(bits=8, **alone)).learns
    wrong, right = plans("quantization-bits", {"method.type": "QDoRA", "method.quantization.bits": 8})
    assert [plan.method.quantization.bits for plan in (wrong, right) if plan.method.quantization] == [8, 4]
    assert observe(Case(adapter=DORA, bits=4, **alone)).learns


@pytest.mark.parametrize(
    ("autocast", "stage", "text"),
    [(None, "forward", "RuntimeError: expected"), ("bfloat16", "backward", "was never reduced")],
    ids=["no-autocast", "autocast"],
)
def test_mixed_precision_of_leaf_units_fails_under_fsdp_1(autocast, stage, text):
    """So the trainer leaves such units as they are held, and autocast alone casts (test_trained_in_float32.py)."""
    fails(Case(adapter=DORA, dtype="bfloat16", param_dtype="bfloat16", compute_autocast=autocast), stage, text)


@pytest.mark.parametrize(("dtype", "moves"), [(torch.bfloat16, False), (torch.float32, True)])
def test_magnitudes_stand_still_in_16_bits(dtype, moves):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["0"], use_dora=True)
    linear = torch.nn.Linear(32, 32, bias=False, dtype=dtype)
    # Rows of real projections have norms around 1; what a fresh layer has is smaller.
    torch.nn.init.normal_(linear.weight, std=1.5 / 32**0.5)
    model = get_peft_model(torch.nn.Sequential(linear), config, autocast_adapter_dtype=False)
    magnitude = next(value for name, value in model.named_parameters() if "magnitude" in name)
    before = magnitude.detach().clone()
    optimizer = torch.optim.AdamW([magnitude], lr=1e-4, weight_decay=0)
    for _ in range(5):
        model(torch.randn(8, 32, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bool((magnitude != before).any()) is moves
    found = findings({}, type="DoRA", dtype=str(dtype).removeprefix("torch."), lora={"autocastAdapterDtype": False})
    assert ("dora-16-bit-magnitude" in found) is not moves
