"""What a manifest leaves open is chosen so that it fits; what it says stays."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import ATTENTION_FIELD, PRECISION_FIELD, RunPlan
from finetune_memory.choices import choose_batches, varlen_problem
from finetune_memory.limit import MemoryLimit
from finetune_memory.verdict import memory_finding
from tests.support.builders import JobBuilder, a_job
from tests.unit.finetune_memory.jobs import GIB, judged, shape_of, small_job, term

MICRO, AGAIN = "training.microBatchSize", "training.activationCheckpointing"
NODE = "parallelism.processesPerNode"


def default_job() -> JobBuilder:
    """Model, data and method alone: the batch is the API's own default."""
    return a_job().spec("training.globalBatchSize", 16)


def masked_job() -> JobBuilder:
    return default_job().spec("model.attention", "sdpa")


def chosen(job: JobBuilder, name: str = "Llama-3.1-8B", gib: float | None = 80) -> dict[str, Any]:
    return {
        choice.field.removeprefix("spec."): choice.value
        for choice in judged(job, name, gib).batches
        if choice.field not in (ATTENTION_FIELD, PRECISION_FIELD)
    }


@pytest.mark.parametrize(
    ("name", "method", "by_gib"),
    [
        # Micro-batch and recomputation of one rank with 24, 48 and 80 GiB; or what makes it fit.
        ("Llama-3.1-8B", "LoRA", {24: (2, "Full"), 48: (2, "None"), 80: (4, "None")}),
        ("Llama-3.1-8B", "QLoRA", {24: (1, "None"), 48: (2, "None"), 80: (4, "None")}),
        ("Qwen3-8B", "LoRA", {24: (2, "Full"), 48: (1, "None"), 80: (2, "None")}),
        ("Gemma-2-9B", "LoRA", {24: {NODE: 4}, 48: (1, "Selective"), 80: (1, "None")}),
        ("Llama-3.1-70B", "LoRA", {24: {NODE: 8, "method.type": "QLoRA"}, 48: {NODE: 8}, 80: {NODE: 4}}),
        ("Llama-3.1-70B", "QLoRA", {24: {NODE: 8}, 48: {NODE: 2}, 80: (4, "Full")}),
        ("Qwen3-30B-A3B", "LoRA", {24: {NODE: 8, "training.precision": "bf16"}, 48: {NODE: 4}, 80: (1, "Full")}),
        ("Mixtral-8x7B", "LoRA", {24: {}, 48: {NODE: 4}, 80: {NODE: 2}}),
        # Little of a mixture of experts is packed, and every rank would load all of it.
        ("Mixtral-8x7B", "QLoRA", {80: {NODE: 2, "method.type": "LoRA", "method.quantization": None}}),
    ],
)
def test_a_manifest_of_model_data_and_method_fits_or_gets_a_change_that_does(name, method, by_gib) -> None:
    for gib, expected in by_gib.items():
        job = default_job().spec("method.type", method)
        verdict = judged(job, name, gib)
        if isinstance(expected, tuple):
            assert verdict.fits, (gib, verdict.estimate.total / GIB)
            assert chosen(job, name, gib) == dict(zip((MICRO, AGAIN), expected, strict=True)), gib
            assert memory_finding(verdict) is None or "host memory" in memory_finding(verdict).message
            continue
        assert not verdict.fits, gib
        if not expected:
            assert "no change suffices, up to 16 times the ranks" in memory_finding(verdict).fix
            continue
        assert verdict.alternative is not None, gib
        assert {change.field.removeprefix("spec."): change.value for change in verdict.alternative.changes} == expected, gib
        told = job
        for path, value in expected.items():
            told = told.spec(path, value) if value is not None else told
        assert judged(told, name, gib).fits, gib


def test_an_estimate_never_exceeds_a_limit_for_what_was_left_open() -> None:
    """If no open value fits, those that need the least are taken, and the advice names other fields alone."""
    for gib in (8, 12, 16, 20):
        verdict = judged(masked_job(), "Llama-3.1-8B", gib)
        assert {choice.value for choice in verdict.batches} == {"bf16", 1, "Full"}
        if not verdict.fits:
            assert verdict.alternative is not None
            assert not {f"spec.{MICRO}", f"spec.{AGAIN}"} & {change.field for change in verdict.alternative.changes}


def test_what_is_written_stays() -> None:
    assert chosen(default_job().spec(MICRO, 8)) == {AGAIN: "Full"}
    assert chosen(default_job().spec(AGAIN, "None"), gib=24) == {MICRO: 1}
    assert chosen(default_job().spec(AGAIN, "None").spec(MICRO, 2)) == {}
    assert chosen(default_job().spec("training.globalBatchSize", 1).spec(AGAIN, "Selective")) == {}


def test_a_compiled_layer_is_computed_again_whole() -> None:
    """A rule refuses selective recomputation of it."""
    values = {chosen(default_job().spec("training.compile", True), "Gemma-2-9B", gib)[AGAIN] for gib in range(24, 120, 12)}
    assert values == {"None", "Full"}
    assert "Selective" in {chosen(default_job(), "Gemma-2-9B", gib)[AGAIN] for gib in range(24, 120, 12)}


def test_the_global_batch_stays_and_its_steps_follow() -> None:
    plan = masked_job().plan()
    (_, micro, again) = judged(masked_job(), gib=24).batches
    made = plan.with_choices([micro, again])
    assert (made.training.micro_batch_size, made.training.gradient_accumulation_steps) == (2, 8)
    assert made.training.global_batch_size == plan.training.global_batch_size == 16
    assert not made.leaves_batches_open
    assert made.with_choices([micro.model_copy(update={"value": 8})]) == made


def test_without_a_limit_or_a_known_model_the_usual_values_stay_with_a_reason() -> None:
    limit = MemoryLimit(80 * GIB, is_device=True, source="")
    for known, reason in (
        (None, "the memory that a rank may take is not known"),
        (limit, "the memory planner does not know this model"),
    ):
        found = choose_batches(default_job().plan(), known, None)
        assert [choice.value for choice in found] == [8, "None"]
        assert all(choice.reason == f"the usual value: {reason}" for choice in found)


def test_a_model_that_cannot_be_computed_again_gets_smaller_batches() -> None:
    def predict(plan: Any) -> Any:
        return judged(default_job().spec(MICRO, plan.training.micro_batch_size).spec(AGAIN, "None"), gib=None).estimate

    limit = MemoryLimit(24 * GIB, is_device=True, source="")
    found = choose_batches(default_job().plan(), limit, predict, can_recompute=False)
    assert [choice.value for choice in found] == [1, "None"]


@pytest.mark.parametrize(
    ("name", "written", "reason"),
    [
        ("Llama-3.1-8B", {}, ""),
        ("Qwen3-8B", {}, ""),
        ("Mixtral-8x7B", {}, ""),
        ("Gemma-2-9B", {}, "transformers has no fused attention for this architecture"),
        ("GPT-2", {}, "the model drops attention scores at random while it is trained"),
        ("Llama-3.1-8B", {"training.precision": "fp32"}, "this job computes in float32, and the kernels only in 16 bits"),
    ],
)
def test_attention_by_the_bounds_of_documents_is_chosen_if_the_configuration_allows_it(name, written, reason) -> None:
    job = default_job()
    for path, value in written.items():
        job = job.spec(path, value)
    (found,) = (choice for choice in judged(job, name).batches if choice.field == "spec.model.attention")
    assert found.value == ("sdpa" if reason else "varlen")
    assert found.reason == (reason or "needs no mask, and computes no scores between documents")
    # Told of a written value, the planner chooses nothing.
    assert not {"sdpa", "varlen"} & {choice.value for choice in judged(job.spec("model.attention", "sdpa"), name).batches}


def test_a_head_that_the_kernels_do_not_take_is_named() -> None:
    plan = default_job().plan()
    facts = shape_of("Llama-3.1-8B", plan).facts
    sizes = (60, 64, 256, 264)
    said = {size: varlen_problem(plan, replace(facts, head_size=size, value_head_size=size), "bfloat16") for size in sizes}
    assert [size for size, problem in said.items() if problem] == [60, 264]
    assert said[60] == "a head has 60 values, and the kernels take a multiple of 8 up to 256"
    assert "values and keys have different sizes" in varlen_problem(plan, replace(facts, value_head_size=64), "bfloat16")
    # So does a plan for this machine's GPU, where no profile says that there is one.
    local = resolve(plan.job, default_job().parse().spec, None, has_gpu=True)
    assert varlen_problem(local, replace(facts, head_size=60, value_head_size=60), "bfloat16") == said[60]
    assert "computes in float32" in varlen_problem(local, facts, "float32")
    # A CPU computes any.
    assert (
        varlen_problem(default_job().with_profile(gpu=None).plan(), replace(facts, head_size=60, value_head_size=60), "float32")
        == ""
    )


def test_without_a_mask_keys_and_values_are_not_repeated() -> None:
    """Two rows of 2,048 tokens in bfloat16: a mask is 2 bytes for each pair, keys and values of 24 more heads of 128."""
    job = small_job().spec("training.microBatchSize", 2)
    masked, bare = (judged(job.spec("model.attention", value)).estimate for value in ("sdpa", "varlen"))
    by_layer = 2 * 2048**2 * 2 + 2 * 2 * 2048 * 24 * 128 * 2
    assert term(masked, "activations") - term(bare, "activations") == pytest.approx(32 * by_layer, rel=0.02)


def test_no_advice_is_given_that_is_not_true() -> None:
    """A global batch of 1 forbids more ranks: a larger one is part of the advice."""
    packed = a_job().spec("training.globalBatchSize", 1).spec("method.type", "QLoRA")
    verdict = judged(packed, "Llama-3.1-70B", 40)
    assert verdict.alternative is not None
    changes = {change.field: change.value for change in verdict.alternative.changes}
    assert changes == {f"spec.{NODE}": 4, "spec.training.globalBatchSize": 4}
    finding = memory_finding(judged(default_job(), "Llama-3.1-405B", 8))
    assert finding is not None
    assert finding.fix.startswith("no change suffices, up to 16 times the ranks: even with spec.parallelism.nodes: 16, ")
    assert finding.fix.count(" needs ") == 1
    assert "spec.data.maxSequenceLength: 256" in finding.fix


def test_a_plan_of_an_earlier_release_keeps_what_it_chose() -> None:
    """Its list of choices holds values, and none that is open."""
    plan = default_job().plan()
    written = plan.with_choices(judged(default_job(), gib=24).batches).model_dump_json()
    read = RunPlan.model_validate_json(written)
    assert not read.leaves_batches_open
    assert choose_batches(read, MemoryLimit(8 * GIB, is_device=True, source=""), None) == ()
    assert (plan.training.micro_batch_size, plan.training.activation_checkpointing.value) == (8, "None")
    assert {choice.field: choice.value for choice in plan.choices if choice.field.endswith(MICRO)} == {f"spec.{MICRO}": None}
