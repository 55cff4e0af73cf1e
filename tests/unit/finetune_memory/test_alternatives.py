"""Changes of a job that does not fit: the cheapest that makes it fit, or none."""

from collections.abc import Callable
from typing import Any

from finetune_job.api.training import ActivationCheckpointing
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.alternatives import ANYWHERE, Site, cheapest_fitting
from finetune_memory.estimate import Estimate, Term
from finetune_memory.limit import MemoryLimit
from finetune_memory.verdict import MemoryVerdict, judge_memory, memory_finding
from tests.support.builders import JobBuilder, a_job
from tests.unit.finetune_memory.jobs import GIB, judged, shape_of, small_job


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
        fixed = job
        for change in alternative.changes:
            fixed = fixed.spec(change.field.removeprefix("spec."), change.value)
        assert judged(fixed, "Llama-3.1-8B", gib).fits, alternative.text


def test_an_elastic_gang_has_to_fit_on_its_fewest_nodes() -> None:
    """A rank holds the more of the base, and the gradients of the more virtual ranks, the fewer ranks there are."""
    fixed = small_job().nodes(4).spec("training.reduction", "Ordered").spec("training.globalBatchSize", 64)
    fixed = fixed.spec("parallelism.fsdp.reshardAfterForward", True)
    gang = fixed.spec("parallelism.elastic.minNodes", 1)
    on_one, on_two, on_four, of_all = (
        judged(job, gib=80).estimate.total
        for job in (gang, gang.spec("parallelism.elastic.minNodes", 2), gang.spec("parallelism.elastic.minNodes", 4), fixed)
    )
    assert on_one > on_two > on_four == of_all
    limit = (on_one + on_two) / 2 / GIB
    assert judged(fixed, gib=limit).fits
    verdict = judged(gang, gib=limit)
    assert not verdict.fits
    by_nodes = changes(gang, lambda plan: 100 // plan.parallelism.smallest_world_size, 50)
    assert by_nodes == {"parallelism.elastic.minNodes": 2}


def test_what_no_change_can_save_is_named() -> None:
    """Of experts that are stored one by one every rank packs the whole base: 8 devices do not load what they could train."""
    packed = small_job().spec("method.type", "QLoRA").processes_per_node(8)
    assert changes_of(judged(packed, "Mixtral-8x7B", 40))["spec.method.type"] == "LoRA"
    finding = memory_finding(judged(packed.spec("merge.base", "Dequantized"), "Mixtral-8x7B", 40))
    assert finding is not None
    assert "packed weights (" in finding.fix
    assert not finding.changes


def test_nothing_helps_a_device_that_is_far_too_small() -> None:
    verdict = judged(a_job(), "Llama-3.1-70B", 2)
    assert not verdict.fits
    assert verdict.alternative is None
    finding = memory_finding(verdict)
    assert finding is not None
    assert "it fits with that on devices of" in finding.fix


def changes_of(verdict: MemoryVerdict) -> dict[str, Any]:
    return {} if verdict.alternative is None else {change.field: change.value for change in verdict.alternative.changes}


def changes(job: JobBuilder, size: Callable[[RunPlan], int], limit: int, site: Site = ANYWHERE) -> dict[str, Any] | None:
    """The changes that are found where a plan takes `size`."""

    def predict(plan: RunPlan) -> Estimate:
        return Estimate((Term("all", size(plan), ""),), "", ())

    found = cheapest_fitting(job.plan(), limit, predict, site)
    return None if found is None else {change.field.removeprefix("spec."): change.value for change in found.changes}


BATCHES = small_job().spec("training.microBatchSize", 8).spec("training.globalBatchSize", 64)
MICRO, LENGTH, AGAIN = "training.microBatchSize", "data.maxSequenceLength", "training.activationCheckpointing"


def test_what_fits_to_the_byte_is_taken() -> None:
    assert changes(BATCHES, lambda plan: 100 * plan.training.micro_batch_size, 400) == {MICRO: 4}
    assert changes(BATCHES, lambda plan: 100 * plan.training.micro_batch_size, 100) == {MICRO: 1}
    assert changes(BATCHES, lambda plan: 100 * plan.training.micro_batch_size, 99) is None


def test_sequences_are_shortened_to_256_tokens() -> None:
    assert changes(small_job(), lambda plan: plan.data.max_sequence_length, 1024) == {LENGTH: 1024}
    assert changes(small_job(), lambda plan: plan.data.max_sequence_length, 256) == {LENGTH: 256}
    assert changes(small_job(), lambda plan: plan.data.max_sequence_length, 255) is None


def test_up_to_sixteen_times_the_nodes() -> None:
    job = small_job().spec("training.globalBatchSize", 64)
    assert changes(job, lambda plan: 1600 // plan.parallelism.world_size, 100) == {"parallelism.nodes": 16}
    assert changes(job, lambda plan: 1600 // plan.parallelism.world_size, 99) is None


def test_more_devices_of_the_one_node_come_before_more_nodes() -> None:
    job = a_job().spec("workspace", {"volumeClaimTemplate": {"storage": "10Gi"}})
    found = judged(job, gib=14)
    assert changes_of(found) == {"spec.parallelism.processesPerNode": 4}
    finding = memory_finding(found)
    assert finding is not None
    assert "a node then needs 4 devices, else set spec.parallelism.nodes to 4" in finding.fix
    # Nodes that are already several are taken to be full, and a node of eight devices is.
    share = lambda plan: 100 // plan.parallelism.world_size  # noqa: E731
    many = Site(has_gpus=True)
    for nodes, processes, added in ((2, 1, {"parallelism.nodes": 4}), (1, 8, None), (1, 4, {"parallelism.processesPerNode": 8})):
        wide = small_job().nodes(nodes).processes_per_node(processes).spec("training.globalBatchSize", 64)
        of_node = changes(wide, share, 50 // (nodes * processes), many)
        assert of_node == added or (added is None and of_node is not None and of_node["parallelism.nodes"] == 2)


def test_a_change_that_barely_fits_is_proposed_only_if_no_other_leaves_room() -> None:
    """One device of an 8B model needs 19.8 GiB, two need 16.2 each, four 12.2."""
    roomy, tight = judged(a_job(), gib=17), judged(a_job(), gib=18.1)
    assert changes_of(roomy) == {"spec.parallelism.processesPerNode": 4}
    assert changes_of(tight) == {"spec.parallelism.processesPerNode": 2}


def test_of_two_changes_the_one_that_costs_less() -> None:
    def either(first: Callable[[RunPlan], bool], second: Callable[[RunPlan], bool]) -> Callable[[RunPlan], int]:
        return lambda plan: 50 if first(plan) or second(plan) else 100

    smaller = lambda plan: plan.training.micro_batch_size < 8  # noqa: E731
    again = lambda plan: plan.training.activation_checkpointing is not ActivationCheckpointing.NONE  # noqa: E731
    shorter = lambda plan: plan.data.max_sequence_length < 2048  # noqa: E731
    assert changes(BATCHES, either(smaller, again), 50) == {MICRO: 4}
    assert changes(BATCHES, either(again, shorter), 50) == {AGAIN: "Selective"}


def test_more_ranks_take_smaller_micro_batches_where_the_global_batch_asks_for_it() -> None:
    job = BATCHES.spec("training.globalBatchSize", 8)
    assert changes(job, lambda plan: 100 // plan.parallelism.nodes, 50) == {"parallelism.nodes": 2, MICRO: 4}


def test_what_rules_refuse_is_not_suggested() -> None:
    compiled = small_job().spec("training.compile", True)
    assert changes(compiled, lambda plan: 50 + 50 * (plan.training.activation_checkpointing == "None"), 50) == {AGAIN: "Full"}
    eight = small_job().spec("method", {"type": "QLoRA", "quantization": {"bits": 8}}).spec("training.globalBatchSize", 64)
    assert changes(eight, lambda plan: 100 // plan.parallelism.nodes, 50) is None
    packed = lambda plan: 50 if plan.method.quantization is not None else 100  # noqa: E731
    for kind in ("LoRA", "DoRA"):
        assert changes(small_job().spec("method.type", kind), packed, 50) == {"method.type": f"Q{kind}"}
    on_cpu = small_job().with_profile(gpu=None, resources={"train": {"memory": "64Gi"}})
    assert changes(on_cpu, packed, 50) is None


def test_weights_that_stay_gathered_are_sharded_again() -> None:
    path = "parallelism.fsdp.reshardAfterForward"
    sharded = lambda plan: 50 if plan.parallelism.fsdp.reshard_after_forward else 100  # noqa: E731
    assert changes(small_job().spec(path, False), sharded, 50) == {path: True}
    found = changes(small_job(), lambda _plan: 100, 100)
    assert found is not None
    assert path not in found


def test_on_one_machine_no_more_ranks_are_proposed_than_it_has_devices() -> None:
    def told(gib: int, devices: int, name: str = "Llama-3.1-70B") -> dict[str, Any]:
        job = a_job().spec("training.globalBatchSize", 16)
        found = changes_of(judged(job, name, gib, devices=devices))
        fixed = job
        for field, value in found.items():
            fixed = fixed.spec(field.removeprefix("spec."), value)
        assert not found or judged(fixed, name, gib, devices=devices).fits
        return found

    assert told(80, 8) == {"spec.parallelism.processesPerNode": 4}
    assert told(80, 1) == {"spec.method.type": "QLoRA"}
    assert told(12, 1, "Llama-3.1-8B") == {"spec.method.type": "QLoRA"}
    assert told(24, 2) == {}
    finding = memory_finding(judged(a_job(), "Llama-3.1-70B", 24, devices=2))
    assert finding is not None
    assert finding.fix.startswith("no change suffices, on this machine: even with spec.parallelism.processesPerNode: 2, ")
    assert "spec.parallelism.nodes" not in finding.fix


def test_a_device_that_is_named_without_a_profile_computes_with_packed_weights() -> None:
    """`finetune estimate --gpu-memory`."""
    plan = a_job().spec("training.globalBatchSize", 16).plan().model_copy(update={"placement": None})
    limit = MemoryLimit(24 * GIB, is_device=True, source="--gpu-memory")
    found = judge_memory(plan, shape_of("Llama-3.1-70B", plan), "bfloat16", limit)
    assert changes_of(found) == {"spec.parallelism.processesPerNode": 8, "spec.method.type": "QLoRA"}
