"""What is said of a job by its limit: whether it fits, the finding, and sizes in words."""

from typing import Any

from finetune_memory.adapters import trained_parameters
from finetune_memory.choices import choose_resharding
from finetune_memory.families import base_parameters
from finetune_memory.limit import MemoryLimit, format_bytes
from finetune_memory.model_shape import ModelShape, facts_of
from finetune_memory.verdict import host_limit_of, judge_memory, limit_of, memory_finding
from tests.support.builders import JobBuilder, a_job
from tests.unit.finetune_memory.configs import CONFIGS
from tests.unit.finetune_memory.jobs import GIB, judged, small_job


def test_a_job_that_fits_has_no_finding() -> None:
    verdict = judged(small_job())
    assert verdict.fits
    assert memory_finding(verdict) is None
    assert memory_finding(judged(small_job(), gib=None)) is None


def test_a_pod_that_its_ranks_will_not_load_in_is_warned_of() -> None:
    """Four devices of 80 GiB hold Mixtral 8x7B, and no pod of 64 GiB four copies of it."""
    job = small_job().processes_per_node(4).spec("training.activationCheckpointing", "Full")
    verdict = judged(job, "Mixtral-8x7B")
    finding = memory_finding(verdict)
    assert verdict.fits
    assert finding is not None
    assert (finding.rule, finding.severity) == ("memory-estimate-exceeds-pod", "warning")
    assert "base while it is loaded 87.0 GiB" in finding.message
    roomy = job.with_profile(resources={"train": {"memory": "400Gi"}})
    assert memory_finding(judged(roomy, "Mixtral-8x7B")) is None


def test_the_finding_names_terms_limit_and_fix() -> None:
    finding = memory_finding(judged(small_job().spec("training.microBatchSize", 8), gib=70))
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
    assert limit_of(a_job().plan()) == MemoryLimit(80 * GIB, is_device=True, source="gpu.memory of profile default")
    job = a_job().nodes(2).processes_per_node(4).with_profile(resources={"train": {"memory": "64Gi"}})
    on_cpu = job.with_profile(gpu=None, resources={"train": {"memory": "64Gi"}}).plan()
    for limit in (limit_of(on_cpu), host_limit_of(job.plan())):
        assert limit is not None
        assert (limit.bytes, limit.is_device) == (16 * GIB, False)


def test_a_pod_without_gpu_is_only_warned() -> None:
    plan_job = a_job().with_profile(gpu=None, resources={"train": {"memory": "4Gi"}})
    plan, config = plan_job.plan(), CONFIGS["Llama-3.1-8B"]
    parameters = trained_parameters(base_parameters(config, "bfloat16"), plan.method, "bfloat16", "llama")
    shape = ModelShape(parameters, (), facts_of(config))
    finding = memory_finding(judge_memory(plan, shape, "bfloat16", limit_of(plan)))
    assert finding is not None
    assert (finding.rule, finding.severity) == ("memory-estimate-exceeds-pod", "warning")


RESHARD = "parallelism.fsdp.reshardAfterForward"


def resharding(job: JobBuilder, gib: float | None, **named: Any) -> bool | None:
    """What was chosen; None: nothing was open."""
    chosen = judged(job, gib=gib, **named).resharding
    assert chosen is None or chosen.field == f"spec.{RESHARD}"
    return None if chosen is None else chosen.value


def test_parameters_stay_gathered_where_that_leaves_a_tenth_of_the_memory() -> None:
    job = small_job().processes_per_node(2)
    kept = judged(job.spec(RESHARD, False)).estimate.total
    least = kept / 0.9 / GIB
    assert resharding(job, least + 0.01) is False
    assert resharding(job, least - 0.01) is True
    roomy, scarce = judged(job, gib=least + 0.01), judged(job, gib=least - 0.01)
    assert roomy.estimate.total == kept
    assert scarce.estimate.total == judged(job.spec(RESHARD, True), gib=least - 0.01).estimate.total < kept
    assert roomy.resharding is not None
    assert roomy.resharding.reason == (
        f"with all weights gathered a rank takes about {format_bytes(kept)} of {format_bytes(int((least + 0.01) * GIB))} "
        "(gpu.memory), of which 10 % are kept free"
    )


def test_parameters_are_freed_if_the_memory_of_a_rank_is_not_known() -> None:
    chosen = judged(small_job().processes_per_node(2), gib=None).resharding
    assert chosen is not None
    assert (chosen.value, chosen.reason) == (True, "least memory: the memory that a rank may take is not known")
    unknown = choose_resharding(small_job().processes_per_node(2).plan(), MemoryLimit(80 * GIB, True, ""), None)
    assert unknown is not None
    assert (unknown.value, unknown.reason) == (True, "least memory: the memory planner does not know this model")


def test_what_is_written_or_has_no_effect_is_not_chosen() -> None:
    job = small_job().processes_per_node(2)
    assert resharding(small_job(), 80) is None
    assert resharding(job.spec(RESHARD, True), 80) is None
    assert resharding(job.spec("parallelism.fsdp.version", 1), 80) is None


def test_no_advice_names_parameters_that_are_freed_anyway() -> None:
    job = small_job().spec("training.microBatchSize", 8).processes_per_node(2)
    verdict = judged(job, gib=20)
    assert not verdict.fits
    assert verdict.resharding is not None
    assert verdict.resharding.value is True
    assert verdict.alternative is not None
    assert f"spec.{RESHARD}" not in {change.field for change in verdict.alternative.changes}
