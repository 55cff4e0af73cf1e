"""What is trained and how ranks share it: what a manifest leaves open, and what fits together."""

from finetune_job.api.job import parse_job
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from tests.unit.finetune_job.api.test_job import changed

IDENTITY = JobIdentity(namespace="team", name="run", uid="0123456789ab")


def plan(path: str = "spec.training.epochs", value: object = 1) -> RunPlan:
    return resolve(IDENTITY, parse_job(changed(path, value)).spec, None)


def test_an_unset_wrap_class_stays_open_for_preflight() -> None:
    assert plan().parallelism.fsdp.transformer_layer_cls_to_wrap is None
    assert plan(
        "spec.parallelism.fsdp.transformerLayerClsToWrap", ["LlamaDecoderLayer"]
    ).parallelism.fsdp.transformer_layer_cls_to_wrap == ("LlamaDecoderLayer",)


def first_version(method: str = "LoRA", **fsdp: bool) -> tuple[bool | None, bool | None, bool | None]:
    """The wrap policy, original parameters and float32 adapters that FSDP 1 gets."""
    document = changed("spec.parallelism.fsdp", {"version": 1, **fsdp})
    document["spec"]["method"] = {"type": method}
    resolved = resolve(IDENTITY, parse_job(document).spec, None)
    chosen, lora = resolved.parallelism.fsdp, resolved.method.lora
    return chosen.peft_wrap_policy, chosen.use_orig_params, lora.autocast_adapter_dtype if lora else None


def test_what_fsdp_1_gets_can_be_flattened() -> None:
    assert first_version() == (True, False, True)
    assert first_version(useOrigParams=True) == (True, True, True)
    assert first_version(peftWrapPolicy=False, useOrigParams=True) == (False, True, False)
    assert first_version("DoRA") == (True, False, True)
    assert first_version("DoRA", useOrigParams=True) == (False, True, True)
    assert first_version("Full") == (False, True, None)
    second = plan().parallelism.fsdp
    assert (second.peft_wrap_policy, second.use_orig_params, second.sync_module_states) == (None, None, None)


def test_only_qlora_packs_its_base() -> None:
    assert plan().method.quantization is None
    packed = plan("spec.method", {"type": "QLoRA", "quantization": {"doubleQuant": False}})
    assert packed.method.quantization is not None
    assert (packed.method.quantization.bits, packed.method.quantization.quant_type.value) == (4, "nf4")
    assert not packed.method.quantization.double_quant
    assert "spec.method.quantization.doubleQuant" not in {choice.field for choice in packed.choices}


def test_patterns_are_kept_in_the_order_of_the_alphabet() -> None:
    method = plan("spec.method", {"type": "LoHa", "settings": {"rankPattern": {"v": 4, "k": 2}}}).method
    assert method.lora is None
    assert method.adapter is not None
    assert list(method.adapter.settings["rankPattern"]) == ["k", "v"]


def test_parameters_are_gathered_in_the_type_of_the_precision() -> None:
    assert plan().parallelism.fsdp.param_dtype is None
    assert plan("spec.training", {"epochs": 1, "precision": "bf16"}).parallelism.fsdp.param_dtype == "bfloat16"
    assert plan("spec.training", {"epochs": 1, "precision": "fp32"}).parallelism.fsdp.param_dtype is None
