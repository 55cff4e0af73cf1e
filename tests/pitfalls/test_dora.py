"""DoRA reads weights of several units at once."""

import pytest
import torch

from tests.pitfalls.cases import Case
from tests.pitfalls.manifests import findings

ORIG_PARAMS = "fsdp1-dora-orig-params"
MIXED = "fsdp1-dora-mixed-precision"


def test_original_parameters_in_leaf_units_fail(fails):
    fails(Case(dora=True, policy="peft", use_orig_params=True), "IndexError", "tuple index out of range")
    assert ORIG_PARAMS in findings({"version": 1, "useOrigParams": True, "peftWrapPolicy": True}, type="DoRA")


def test_one_rank_hides_the_failure(learns):
    learns(Case(dora=True, policy="peft", use_orig_params=True), world_size=1)


@pytest.mark.parametrize(
    ("case", "fsdp"),
    [
        (Case(dora=True, policy="peft"), {"version": 1, "useOrigParams": False, "peftWrapPolicy": True}),
        (
            Case(dora=True, policy="transformer", use_orig_params=True),
            {"version": 1, "useOrigParams": True, "peftWrapPolicy": False},
        ),
        (Case(dora=True, version=2), {"version": 2, "useOrigParams": True}),
    ],
    ids=["flat-leaf-units", "layer-units", "fsdp-2"],
)
def test_fixes_train(learns, case, fsdp):
    learns(case)
    assert ORIG_PARAMS not in findings(fsdp, type="DoRA")


def test_adapter_attached_after_sharding_fails(fails):
    """Why the trainer attaches adapters first: magnitudes are norms of whole weights, which a shard does not have."""
    fails(Case(dora=True, attach_after_wrapping=True), "Error")
    fails(Case(attach_after_wrapping=True), "optimizer got an empty parameter list")


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_mixed_precision_of_leaf_units_fails_under_fsdp_1(fails, autocast):
    fails(Case(dora=True, dtype="bfloat16", param_dtype="bfloat16", compute_autocast=autocast), "RuntimeError: expected")
    assert MIXED in findings({"version": 1, "mixedPrecision": {"paramDtype": "bfloat16"}}, type="DoRA")


@pytest.mark.parametrize(
    ("case", "fsdp"),
    [
        (Case(dora=True, dtype="bfloat16"), {"version": 1}),
        (Case(dora=True, dtype="bfloat16", param_dtype="float32"), {"version": 1, "mixedPrecision": {"paramDtype": "float32"}}),
        (Case(dora=True, version=2, param_dtype="bfloat16"), {"version": 2, "mixedPrecision": {"paramDtype": "bfloat16"}}),
    ],
    ids=["no-cast", "adapters-type", "fsdp-2"],
)
def test_mixed_precision_fixes_train(learns, case, fsdp):
    learns(case)
    assert MIXED not in findings(fsdp, type="DoRA")


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
