"""FSDP 1 lays a unit into one flat parameter, which has one element type."""

from tests.pitfalls.cases import Case
from tests.pitfalls.manifests import findings

ADAPTER = "fsdp1-adapter-dtype"
COMPUTE = "fsdp1-qlora-compute-dtype"
UNIFORM = "ValueError: Must flatten tensors with uniform dtype"
LAYERS = {"version": 1, "useOrigParams": True, "peftWrapPolicy": False}


def test_float32_adapters_in_16_bit_layers_fail(fails):
    fails(Case(dtype="bfloat16", policy="transformer", use_orig_params=True), UNIFORM)
    assert ADAPTER in findings(LAYERS, type="LoRA", dtype="bfloat16", lora={"autocastAdapterDtype": True})
    fails(Case(dora=True, dtype="bfloat16", policy="transformer", use_orig_params=True), UNIFORM)
    assert ADAPTER in findings(LAYERS, type="DoRA", dtype="bfloat16")


def test_adapters_of_the_bases_type_train(learns):
    learns(Case(dtype="bfloat16", policy="transformer", use_orig_params=True, autocast=False))
    assert ADAPTER not in findings(LAYERS, type="LoRA", dtype="bfloat16", lora={"autocastAdapterDtype": False})


def test_units_of_their_own_train(learns):
    learns(Case(dtype="bfloat16", policy="peft"))
    assert ADAPTER not in findings({"version": 1, "peftWrapPolicy": True}, type="LoRA", dtype="bfloat16")


def test_adapters_of_a_4_bit_base_take_its_compute_type(fails, learns):
    case = {
        "bits": 4,
        "storage": "bfloat16",
        "dtype": "bfloat16",
        "policy": "transformer",
        "use_orig_params": True,
        "autocast": False,
    }
    lora = {"autocastAdapterDtype": False}
    fails(Case(**case, compute="float32"), UNIFORM)
    assert COMPUTE in findings(LAYERS, type="QLoRA", dtype="bfloat16", lora=lora, quantization={"computeDtype": "float32"})
    learns(Case(**case, compute="bfloat16"))
    assert COMPUTE not in findings(LAYERS, type="QLoRA", dtype="bfloat16", lora=lora, quantization={"computeDtype": "bfloat16"})


def test_biases_are_trained_in_the_bases_type_under_fsdp_2(fails, learns, base_with_biases):
    rule = "fsdp2-trained-bias-dtype"
    fails(Case(dtype="bfloat16", bias="all", version=2), "FSDP expects uniform original parameter dtype", model=base_with_biases)
    assert rule in findings({"version": 2}, type="LoRA", dtype="bfloat16", lora={"bias": "all"})
    learns(Case(dtype="bfloat16", bias="all", version=2, autocast=False), model=base_with_biases)
    assert rule not in findings({"version": 2}, type="LoRA", dtype="bfloat16", lora={"bias": "all", "autocastAdapterDtype": False})
    learns(Case(bias="all", version=2), model=base_with_biases)
    assert rule not in findings({"version": 2}, type="LoRA", dtype="float32", lora={"bias": "all"})
