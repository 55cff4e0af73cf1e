"""The estimate of whole jobs: what changes it, what fits, and what is said of one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_memory.activations import layer_names
from finetune_memory.adapters import trained_parameters
from finetune_memory.estimate import Estimate
from finetune_memory.families import base_parameters
from finetune_memory.limits import Limit, limit_of, quantity_bytes, shown
from finetune_memory.model_shape import ModelShape, facts_of
from finetune_memory.sharding import unit_names
from finetune_memory.verdict import MemoryVerdict, finding_of, judge_memory
from tests.support.builders import JobBuilder, a_job
from tests.unit.memory.configs import CONFIGS

GIB = 2**30


def judged(job: JobBuilder, name: str = "Llama-3.1-8B", gib: float | None = 80, *, longest: int | None = None) -> MemoryVerdict:
    plan, config = job.plan(), CONFIGS[name]
    held = "float32" if plan.method.type.value == "Full" else "bfloat16"
    parameters = trained_parameters(base_parameters(config, held), plan.method, held, config["model_type"])
    shape = ModelShape(parameters, unit_names(parameters, plan.parallelism.fsdp, layer_names(parameters)), facts_of(config))
    limit = None if gib is None else Limit(int(gib * GIB), is_device=True, source="gpu.memory")
    return judge_memory(plan, shape, "bfloat16", limit, longest=longest)


def term(estimate: Estimate, name: str) -> int:
    return sum(each.bytes for each in estimate.terms if each.name == name)


def small_job() -> JobBuilder:
    return a_job().spec("training.microBatchSize", 1).spec("data.maxSequenceLength", 2048)


def changed(**fields: Any) -> int:
    job = small_job()
    for path, value in fields.items():
        job = job.spec(path.replace("__", "."), value)
    return judged(job).estimate.total


def test_weights_are_two_bytes_a_parameter() -> None:
    assert term(judged(small_job()).estimate, "frozen weights") == 2 * 8_030_261_248


def test_ranks_share_weights_but_not_activations() -> None:
    one, eight = judged(small_job()).estimate, judged(small_job().processes_per_node(8)).estimate
    assert term(eight, "frozen weights") * 8 == term(one, "frozen weights")
    assert term(eight, "activations") == pytest.approx(term(one, "activations"), rel=0.01)
    assert term(eight, "gathered weights") > 0 == term(one, "gathered weights")


def test_each_saving_saves() -> None:
    plain = changed()
    assert changed(training__activationCheckpointing="Full") < changed(training__activationCheckpointing="Selective") < plain
    assert changed(training__precision="bf16") < plain
    assert changed(data__maxSequenceLength=1024) < plain < changed(data__maxSequenceLength=4096)
    assert plain < changed(training__microBatchSize=2) < changed(training__microBatchSize=4)
    assert changed(method__type="QLoRA") < plain < changed(model__attention="eager")


def test_gathered_weights_stay_without_resharding() -> None:
    job = small_job().processes_per_node(8)
    kept = judged(job.spec("parallelism.fsdp.reshardAfterForward", False)).estimate
    assert term(kept, "gathered weights") > 2 * 8_030_261_248 > 3 * term(judged(job).estimate, "gathered weights")


def test_full_fine_tuning_holds_float32_weights_moments_and_gradients() -> None:
    job = small_job().spec("method", {"type": "Full"}).spec("training.activationCheckpointing", "Full")
    estimate = judged(job, "Llama-3.2-1B").estimate
    weights = 4 * 1_235_814_400
    assert (term(estimate, "trained weights"), term(estimate, "gradients")) == (weights, weights)
    assert term(estimate, "optimizer state") == 2 * weights + 4 * 146


def test_short_records_need_less() -> None:
    job = small_job().spec("data.packing", False)
    assert judged(job, longest=200).estimate.total < judged(job).estimate.total
    packed = small_job().spec("data.packing", True)
    assert judged(packed, longest=200).estimate.total == judged(packed).estimate.total


def test_a_job_that_fits_has_no_finding() -> None:
    verdict = judged(small_job())
    assert verdict.fits
    assert finding_of(verdict) is None
    assert finding_of(judged(small_job(), gib=None)) is None


def test_the_cheapest_change_comes_first_and_the_batch_stays() -> None:
    job = small_job().spec("training.microBatchSize", 8)
    assert not judged(job, gib=70).fits
    alternative = judged(job, gib=70).alternative
    assert alternative is not None
    assert [change.field for change in alternative.changes] == ["spec.training.microBatchSize"]
    assert alternative.estimate.total <= 70 * GIB
    larger = 2 * alternative.changes[0].value
    assert judged(job.spec("training.microBatchSize", larger)).estimate.total > 70 * GIB


def test_changes_that_a_manifest_takes_make_it_fit() -> None:
    job = a_job().spec("data.maxSequenceLength", 8192).spec("training.microBatchSize", 4).processes_per_node(2)
    for gib in (24, 12, 8):
        alternative = judged(job, "Llama-3.1-8B", gib).alternative
        assert alternative is not None, gib
        mended = job
        for change in alternative.changes:
            mended = mended.spec(change.field.removeprefix("spec."), change.value)
        assert judged(mended, "Llama-3.1-8B", gib).fits, alternative.text


def test_attention_that_an_architecture_does_not_have_is_not_counted() -> None:
    """Gemma 2 has no SDPA, so the trainer takes eager attention where the job leaves it open, and scores are kept."""
    eager = judged(small_job().spec("model.attention", "eager"), "Gemma-2-9B").estimate
    assert judged(small_job(), "Gemma-2-9B").estimate == eager
    assert judged(small_job()).estimate != judged(small_job().spec("model.attention", "eager")).estimate


def host(job: JobBuilder, name: str) -> dict[str, int]:
    return {each.name: each.bytes for each in judged(job, name).estimate.host_terms}


def test_ranks_that_load_the_whole_base_hold_it_in_host_memory() -> None:
    """Experts that stand in the files one by one, and a rank alone. Others read their shards; packed weights go to the device."""
    eight, loaded = small_job().processes_per_node(8), "base while it is loaded"
    assert host(eight, "Mixtral-8x7B")[loaded] == 2 * 46_702_792_704
    assert host(small_job(), "Llama-3.1-8B")[loaded] == 2 * 8_030_261_248
    assert loaded not in host(eight, "Llama-3.1-8B")
    assert loaded not in host(eight.spec("method.type", "QLoRA"), "Mixtral-8x7B")


def test_a_pod_that_its_ranks_will_not_load_in_is_warned_of() -> None:
    """Four devices of 80 GiB hold Mixtral 8x7B, and no pod of 64 GiB four copies of it."""
    job = small_job().processes_per_node(4).spec("training.activationCheckpointing", "Full")
    verdict = judged(job, "Mixtral-8x7B")
    finding = finding_of(verdict)
    assert verdict.fits
    assert finding is not None
    assert (finding.rule, finding.severity) == ("memory-estimate-exceeds-pod", "warning")
    assert "base while it is loaded 87.0 GiB" in finding.message
    roomy = job.with_profile(resources={"train": {"memory": "400Gi"}})
    assert finding_of(judged(roomy, "Mixtral-8x7B")) is None


def test_what_no_change_can_save_is_named() -> None:
    """Every rank packs the whole base: 8 devices of 12 GiB do not load what they could train."""
    finding = finding_of(judged(small_job().spec("method.type", "QLoRA").processes_per_node(8), "Llama-3.1-70B", 12))
    assert finding is not None
    assert "packed weights (" in finding.fix
    assert not finding.changes


def test_nothing_helps_a_device_that_is_far_too_small() -> None:
    verdict = judged(a_job(), "Llama-3.1-70B", 2)
    assert not verdict.fits
    assert verdict.alternative is None
    finding = finding_of(verdict)
    assert finding is not None
    assert "larger devices" in finding.fix


def test_the_finding_names_terms_limit_and_fix() -> None:
    finding = finding_of(judged(small_job().spec("training.microBatchSize", 8), gib=70))
    assert finding is not None
    assert (finding.rule, finding.severity, finding.field) == (
        "memory-estimate-exceeds-gpu",
        "error",
        "spec.training.microBatchSize",
    )
    assert "of 70.0 GiB (gpu.memory); largest: activations" in finding.message
    assert finding.fix.startswith("set spec.training.microBatchSize: ")
    assert finding.changes


def test_limits_come_from_the_profile() -> None:
    assert limit_of(a_job().plan()) == Limit(80 * GIB, is_device=True, source="gpu.memory of profile default")
    on_cpu = a_job().with_profile(gpu=None, resources={"train": {"memory": "64Gi"}}).processes_per_node(2).plan()
    limit = limit_of(on_cpu)
    assert limit is not None
    assert (limit.bytes, limit.is_device) == (32 * GIB, False)


def test_a_pod_without_gpu_is_only_warned() -> None:
    plan_job = a_job().with_profile(gpu=None, resources={"train": {"memory": "4Gi"}})
    plan, config = plan_job.plan(), CONFIGS["Llama-3.1-8B"]
    parameters = trained_parameters(base_parameters(config, "bfloat16"), plan.method, "bfloat16", "llama")
    shape = ModelShape(parameters, (), facts_of(config))
    finding = finding_of(judge_memory(plan, shape, "bfloat16", limit_of(plan)))
    assert finding is not None
    assert (finding.rule, finding.severity) == ("memory-estimate-exceeds-pod", "warning")


@pytest.mark.parametrize(("text", "expected"), [("80Gi", 80 * GIB), ("1.5Gi", 3 * GIB // 2), ("80G", 80 * 10**9), ("1000", 1000)])
def test_quantities(text: str, expected: int) -> None:
    assert quantity_bytes(text) == expected


def test_what_is_no_quantity_is_named() -> None:
    with pytest.raises(ValueError, match="'80 Gigs' is not a quantity"):
        quantity_bytes("80 Gigs")


def test_sizes_for_people() -> None:
    assert [shown(size) for size in (12, 2048, 5 * 2**20, 3 * GIB // 2)] == ["12 B", "2.0 KiB", "5.0 MiB", "1.5 GiB"]
