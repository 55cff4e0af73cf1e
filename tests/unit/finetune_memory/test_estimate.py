"""The estimate of whole jobs: what it adds up, and what changes it."""

from typing import Any

import pytest

from tests.support.builders import JobBuilder
from tests.unit.finetune_memory.jobs import GIB, judged, small_job, term


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


def test_an_ordered_reduction_keeps_adapters_whole_and_the_sum_of_their_gradients() -> None:
    job = small_job().processes_per_node(8)
    fast, ordered = judged(job).estimate, judged(job.spec("training.reduction", "Ordered")).estimate
    weights = 4 * 41_943_040  # rank 16 on all linear layers
    assert (term(fast, "trained weights"), term(ordered, "trained weights")) == (weights // 8, weights)
    assert term(ordered, "frozen weights") == term(fast, "frozen weights")
    assert term(ordered, "gradients") == weights
    assert term(fast, "ordered sum") == 0
    # Of a large adapter the optimizer step needs the most: a second copy, and a million values of each of nine ranks.
    large = job.spec("training", {"maxSteps": 1, "globalBatchSize": 8, "reduction": "Ordered"}).spec("method.lora.r", 512)
    step = judged(large.spec("data.maxSequenceLength", 16).spec("parallelism.fsdp.reshardAfterForward", True)).estimate
    assert (step.moment, term(step, "ordered sum")) == ("the optimizer step", 32 * weights + 9 * 4 * 2**20)


def test_each_saving_saves() -> None:
    plain = changed()
    assert changed(training__activationCheckpointing="Full") < changed(training__activationCheckpointing="Selective") < plain
    # Unset it is chosen by the type of the base, and DoRA in float32 costs more.
    assert changed(method__type="DoRA", training__precision="bf16") == changed(method__type="DoRA")
    exact = {"method__type": "DoRA", "parallelism__fsdp": {"mixedPrecision": {"paramDtype": "float32"}}}
    assert changed(method__type="DoRA") < changed(**exact)
    assert changed(data__maxSequenceLength=1024) < plain < changed(data__maxSequenceLength=4096)
    assert plain < changed(training__microBatchSize=2) < changed(training__microBatchSize=4)
    assert changed(method__type="QLoRA") < plain < changed(model__attention="eager")


def test_gathered_weights_stay_without_resharding() -> None:
    job = small_job().processes_per_node(8)
    kept, freed = (judged(job.spec("parallelism.fsdp.reshardAfterForward", value)).estimate for value in (False, True))
    assert term(kept, "gathered weights") > 2 * 8_030_261_248 > 3 * term(freed, "gathered weights")


def test_full_fine_tuning_holds_float32_weights_moments_and_gradients() -> None:
    job = small_job().spec("method", {"type": "Full"}).spec("training.activationCheckpointing", "Full")
    estimate = judged(job, "Llama-3.2-1B").estimate
    weights = 4 * 1_235_814_400
    assert (term(estimate, "trained weights"), term(estimate, "gradients")) == (weights, weights)
    assert term(estimate, "optimizer state") == 2 * weights + 4 * 146


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("name", "gib", "layers", "hidden", "width"),
    [("Llama-3.1-70B", 24, 80, 8192, 28672), ("Llama-3.1-405B", 80, 126, 16384, 53248)],
)
def test_eight_ranks_share_a_packed_base(version: int, name: str, gib: int, layers: int, hidden: int, width: int) -> None:
    """70B on 8 x 24 GiB and 405B on 8 x 80 GiB: half a byte a value, cut into 8; the scales are whole on every rank."""
    job = small_job().spec("method.type", "QLoRA").spec("training.activationCheckpointing", "Full").processes_per_node(8)
    verdict = judged(job.spec("parallelism.fsdp.version", version), name, gib)
    assert verdict.fits
    # Of a layer: queries and output, keys and values, three of the MLP.
    linear = 2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * width
    embeddings, norms = 2 * 128256 * hidden * 2, (2 * layers + 1) * hidden * 2
    assert term(verdict.estimate, "frozen weights") == (layers * linear // 2 + embeddings + norms) // 8
    # A byte for 64 values, 4 bytes for 256 of these; two code books of 16 and 256 values and a mean for each weight.
    assert term(verdict.estimate, "constants") == layers * linear // 64 + layers * linear // 64 // 256 * 4 + 7 * layers * 1092
    assert term(verdict.estimate, "packed weights") == 0
    # A checkpoint's copy: weights and two moments of the adapters' shard, in float32; and the process.
    adapters = 16 * layers * (4 * hidden + 2 * (hidden + 1024) + 3 * (hidden + width))
    assert verdict.estimate.host_total < 12 * adapters // 8 + 2 * GIB


@pytest.mark.parametrize(
    ("method", "name", "held"),
    [
        ("LoRA", "Llama-3.1-8B", "as bfloat16"),
        # Embeddings and head, 2 x 128,256 x 4,096 of 8,030,261,248 values, and norms are not packed.
        ("QLoRA", "Llama-3.1-8B", "86.9% of its values in 4 bits, the rest as bfloat16"),
        # Of 46,702,792,704 values only those of the attention, 32 x 41,943,040, are in linear layers; 32 x 8 x 3 x 4,096 x 14,336
        # are experts'.
        ("QLoRA", "Mixtral-8x7B", "2.9% of its values in 4 bits, the rest as bfloat16: 96.6% are experts, which are not packed"),
    ],
)
def test_the_estimate_says_what_is_packed(method: str, name: str, held: str) -> None:
    estimate = judged(small_job().spec("method.type", method), name, gib=None).estimate
    assert next(each.detail for each in estimate.terms if each.name == "frozen weights") == f"all of the base, {held}"


def test_a_packed_base_of_which_every_rank_reads_all_is_whole_while_it_is_loaded() -> None:
    """Experts are stored one by one, and stay in 16 bits; the linear layers around them are packed."""
    job = small_job().spec("method.type", "QLoRA").spec("training.activationCheckpointing", "Full").processes_per_node(8)
    estimate = judged(job, "Mixtral-8x7B").estimate
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    whole = 2 * (46_702_792_704 - attention) + attention // 2
    assert (estimate.moment, term(estimate, "packed weights")) == ("loading", whole - term(estimate, "frozen weights"))


def test_short_records_need_less() -> None:
    job = small_job().spec("data.packing", False)
    assert judged(job, longest=200).estimate.total < judged(job).estimate.total
    packed = small_job().spec("data.packing", True)
    assert judged(packed, longest=200).estimate.total == judged(packed).estimate.total


def test_attention_that_an_architecture_does_not_have_is_not_counted() -> None:
    """Gemma 2 has no SDPA, so the trainer takes eager attention where the job leaves it open, and scores are kept."""
    eager = judged(small_job().spec("model.attention", "eager"), "Gemma-2-9B").estimate
    assert judged(small_job(), "Gemma-2-9B").estimate == eager
    assert judged(small_job()).estimate != judged(small_job().spec("model.attention", "eager")).estimate


def host(job: JobBuilder, name: str) -> dict[str, int]:
    return {each.name: each.bytes for each in judged(job, name).estimate.host_terms}


def test_ranks_that_load_the_whole_base_hold_it_in_host_memory() -> None:
    """Experts that the files hold one by one, and a rank alone. Others read their shards; packed weights go to the device."""
    eight, loaded = small_job().processes_per_node(8), "base while it is loaded"
    assert host(eight, "Mixtral-8x7B")[loaded] == 2 * 46_702_792_704
    assert host(small_job(), "Llama-3.1-8B")[loaded] == 2 * 8_030_261_248
    assert loaded not in host(eight, "Llama-3.1-8B")
    assert loaded not in host(eight.spec("method.type", "QLoRA"), "Mixtral-8x7B")
    # In full fine-tuning all of it is trained, in float32, and none of it is packed.
    full = small_job().spec("method", {"type": "Full"}).spec("checkpoint.asynchronous", False)
    assert host(full, "Llama-3.1-8B")[loaded] == 4 * 8_030_261_248
    assert host(full.processes_per_node(8), "Mixtral-8x7B")[loaded] == 4 * 46_702_792_704
    assert loaded not in host(full.processes_per_node(8), "Llama-3.1-8B")
