"""The planner's formulas on models of a few values, each figure computed by hand."""

from dataclasses import replace

import pytest

from finetune_job.api.inputs import Attention
from finetune_job.api.pod_settings import quantity_bytes
from finetune_job.plan.element_types import Elements
from finetune_job.plan.method_plan import QuantizationPlan
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.activations import TrainingPass
from finetune_memory.adapters import quantised, scale_bytes, trained_parameters
from finetune_memory.estimate import Estimate, Term, _Estimator, estimate
from finetune_memory.layers import read_layers
from finetune_memory.limit import MemoryLimit, format_bytes
from finetune_memory.loss import loss_bytes, rows_per_part
from finetune_memory.model_shape import ArchitectureFacts, Kind, ModelShape, ParameterShape, Workload
from finetune_memory.optimizers import state_bytes
from finetune_memory.sharding import Shards, Unit, gathered_bytes, reduced_bytes, shards, unit_names
from finetune_memory.verdict import MemoryVerdict, workload
from tests.support.builders import JobBuilder, a_job
from tests.unit.finetune_memory.jobs import GIB, judged, small_job, term

PLAIN = Elements("bfloat16", None, None, "bfloat16", casts_parameters=False)
FACTS = ArchitectureFacts(
    hidden_size=8,
    num_heads=4,
    num_key_value_heads=2,
    head_size=2,
    value_head_size=2,
    vocabulary_size=1000,
    experts_per_token=2,
    activation="silu",
    attention_dropout=0.0,
    residual_dropout=0.0,
    score_softcap=False,
    has_whole_logits=False,
    rotates_positions=True,
    has_fused_attention=True,
    is_stored_otherwise=False,
)


def weight(
    shape: tuple[int, ...], dtype: str = "bfloat16", *, trained: bool = False, name: str = "a.weight", kind: Kind = "linear"
) -> ParameterShape:
    return ParameterShape(name, shape, dtype, is_trained=trained, kind=kind)


# --- 4-bit weights (bitsandbytes: functional.quantize_4bit) ---


def packing(bits: int = 4, *, double: bool = False, storage: str | None = None) -> QuantizationPlan:
    written = {"method.type": "QLoRA", "method.quantization": {"bits": bits, "doubleQuant": double, "quantStorage": storage}}
    job = a_job()
    for path, value in written.items():
        job = job.spec(path, value)
    found = job.plan().method.quantization
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("storage", "shape", "dtype"), [(None, (49, 1), "bfloat16"), ("uint8", (98, 1), "uint8"), ("float32", (25, 1), "float32")]
)
def test_two_values_share_a_byte_and_bytes_share_a_value_of_the_storage(
    storage: str | None, shape: tuple[int, int], dtype: str
) -> None:
    # 3 x 65 = 195 values are 98 bytes; 4 blocks of 64 have a float32 scale each, and a code book of 16 float32 numbers.
    (packed,), constant = quantised([weight((3, 65))], packing(storage=storage), "bfloat16")
    assert (packed.shape, packed.dtype) == (shape, dtype)
    assert constant == 4 * 4 + 64


def test_eight_bit_weights_have_a_scale_for_each_row() -> None:
    (packed,), constant = quantised([weight((3, 65))], packing(8), "bfloat16")
    assert (packed.shape, packed.dtype, constant) == ((3, 65), "int8", 12)


def test_what_is_trained_the_head_and_what_is_no_layer_are_not_packed() -> None:
    kept = [
        weight((4, 4), trained=True),
        weight((4, 4), name="lm_head.weight"),
        weight((4, 4), kind="embedding"),
        weight((4,), kind="other"),
    ]
    assert quantised(kept, packing(), "bfloat16") == (tuple(kept), 0)


@pytest.mark.parametrize(
    ("values", "plain", "nested"),
    [
        (1, 4 + 64, 1 + 4 + 4 + 64 + 1024),
        (64, 4 + 64, 1 + 4 + 4 + 64 + 1024),
        (65, 8 + 64, 2 + 4 + 4 + 64 + 1024),
        # 513 scales in three groups of 256.
        (64 * 512 + 1, 513 * 4 + 64, 513 + 3 * 4 + 4 + 64 + 1024),
    ],
)
def test_scales_of_a_packed_weight(values: int, plain: int, nested: int) -> None:
    assert (scale_bytes(values, is_nested=False), scale_bytes(values, is_nested=True)) == (plain, nested)


# --- adapters ---


def adapted(job: JobBuilder, *base: ParameterShape, held: str = "bfloat16") -> dict[str, tuple[tuple[int, ...], str]]:
    found = trained_parameters(base, job.plan().method, held, "llama")
    return {each.name.removeprefix("base_model.model."): (each.shape, each.dtype) for each in found if each.is_trained}


def test_shapes_of_adapters() -> None:
    layers = weight((6, 4), name="m.q.weight"), weight((6, 4), name="m.c.weight", kind="transposed")
    assert adapted(small_job().spec("method.lora.r", 2), *layers) == {
        "m.q.lora_A.default.weight": ((2, 4), "float32"),
        "m.q.lora_B.default.weight": ((6, 2), "float32"),
        # transformers' Conv1D is stored as [inputs, outputs].
        "m.c.lora_A.default.weight": ((2, 6), "float32"),
        "m.c.lora_B.default.weight": ((4, 2), "float32"),
    }
    as_base = small_job().spec("method.lora", {"r": 2, "autocastAdapterDtype": False})
    assert {dtype for _, dtype in adapted(as_base, *layers).values()} == {"bfloat16"}


def test_shapes_of_adapters_on_stacked_experts() -> None:
    job = small_job().spec("method.lora", {"r": 2, "targetParameters": ["experts.down_proj"]})
    stack = weight((5, 4, 6), name="m.experts.down_proj", kind="other")
    assert adapted(job, stack) == {
        "m.experts.lora_A.default.weight": ((10, 6), "float32"),
        "m.experts.lora_B.default.weight": ((4, 10), "float32"),
    }


def test_full_fine_tuning_trains_all_in_the_type_that_is_held() -> None:
    job = small_job().spec("method", {"type": "Full"})
    assert adapted(job, weight((6, 4)), held="float32") == {"a.weight": ((6, 4), "float32")}


# --- shards (torch: fully_shard's _fsdp_param.py; FSDP 1's _flat_param.py) ---


def sharding(**written: object) -> RunPlan:
    job = small_job().processes_per_node(4)
    for name, value in written.items():
        job = job.spec(f"parallelism.fsdp.{name}", value)
    return job.plan()


def of_ranks(unit: Unit, plan: RunPlan) -> list[Shards]:
    return [shards([unit], plan.parallelism.fsdp, 4, rank) for rank in range(4)]


def test_version_2_pads_each_shard_to_the_largest_and_padding_has_no_state() -> None:
    # 5 rows over 4 ranks: 2, 2, 1 and none, in places for 2. Rows of 3 values: 12 bytes in float32, 6 in bfloat16.
    trained = of_ranks(Unit("u", (weight((5, 3), "float32", trained=True),)), sharding())
    assert [each.trained for each in trained] == [24] * 4
    assert [each.trained_elements for each in trained] == [24, 24, 12, 0]
    assert [(each.gradients, each.trained_tensors, each.frozen) for each in trained] == [(24, 1, 0)] * 4
    assert of_ranks(Unit("u", (weight((5, 3)),)), sharding()) == [Shards(12, 0, 0, 0, 0)] * 4


def test_version_1_cuts_one_flat_parameter() -> None:
    plan = sharding(version=1, useOrigParams=False)
    # 7 + 4 = 11 values: shards of 3.
    unit = Unit("u", (weight((7,), "float32", trained=True), weight((4,), "float32", trained=True)))
    assert of_ranks(unit, plan) == [Shards(0, 12, 12, 12, 1)] * 4
    assert of_ranks(Unit("u", (weight((7,)), weight((4,)))), plan) == [Shards(6, 0, 0, 0, 0)] * 4


def test_version_1_with_original_parameters_begins_each_at_16_bytes_and_has_a_gradient_for_all() -> None:
    plan = sharding(version=1, useOrigParams=True)
    # Values 0 to 4 are frozen, 8 to 10 trained; with padding 12, of which each rank has 3.
    unit = Unit("u", (weight((5,), "float32"), weight((3,), "float32", trained=True)))
    assert of_ranks(unit, plan) == [
        Shards(12, 0, 0, 12, 1),
        Shards(12, 0, 0, 12, 1),
        Shards(8, 4, 4, 12, 1),
        Shards(4, 8, 8, 12, 1),
    ]


def units(*sizes: int, root: int = 0) -> list[Unit]:
    found = [Unit(f"u{number}", (weight((size,)),)) for number, size in enumerate(sizes)]
    return [*found, Unit("", (weight((root,)),))] if root else found


def test_whole_parameters_at_the_fullest_moment() -> None:
    second, kept, first = (sharding(**each).parallelism.fsdp for each in ({}, {"reshardAfterForward": False}, {"version": 1}))
    # 20 and 60 bytes, and 10 of the root.
    some = units(10, 30, root=5)
    assert gathered_bytes(some, second, PLAIN) == 10 + 3 * 60
    assert gathered_bytes(units(10, 30, root=100), second, PLAIN) == 2 * 200 + 60
    assert gathered_bytes(some, kept, PLAIN) == 10 + 80 + 60
    assert gathered_bytes(some, first, PLAIN) == 10 + 2 * 60
    assert gathered_bytes(units(root=5), second, PLAIN) == 20


def test_units_by_size_have_a_hundred_million_values_by_default() -> None:
    """torch's own default (torch/distributed/fsdp/wrap.py, size_based_auto_wrap_policy)."""
    plan = sharding(autoWrapPolicy="SIZE_BASED_WRAP")
    small, large = weight((99_999_999,), name="a.small.weight"), weight((100_000_000,), name="b.large.weight")
    assert unit_names([small, large], plan.parallelism.fsdp, []) == ("b.large",)


def test_packed_values_are_gathered_as_they_are() -> None:
    unit = Unit("u", (weight((10, 1), "uint8"), weight((10,))))
    assert (unit.gathered_bytes("float32"), unit.gathered_bytes(None)) == (10 + 40, 10 + 20)


def test_gradients_are_whole_and_laid_out_for_the_reduction() -> None:
    reduced = Elements("bfloat16", None, "float32", "bfloat16", casts_parameters=True)
    cast = Elements("float32", "bfloat16", None, "float32", casts_parameters=True)
    trained = [Unit("u", (weight((10,), trained=True), weight((99,)))), Unit("v", (weight((4,), trained=True),))]
    assert reduced_bytes(trained, reduced) == 10 * 2 + 10 * 4
    assert reduced_bytes([Unit("u", (weight((10,), "float32", trained=True),))], cast) == 10 * 2 + 10 * 2
    assert reduced_bytes(units(10), reduced) == 0


# --- logits and loss ---


def during(facts: ArchitectureFacts = FACTS, *, on_gpu: bool = False, elements: Elements = PLAIN) -> TrainingPass:
    return TrainingPass(facts, Workload(rows=2, length=64, has_mask=False, on_gpu=on_gpu), elements, Attention.SDPA, 0.0)


def model(*parameters: ParameterShape, facts: ArchitectureFacts = FACTS) -> ModelShape:
    return ModelShape(parameters, (), facts)


def test_the_loss_of_128_tokens() -> None:
    head = weight((1000, 8), name="lm_head.weight")
    # Kept: norm of float32 and its root, and the hidden states. Then: rows and their gradient; logits, and three of float32.
    kept, working = 128 * (8 * 4 + 4) + 128 * 8 * 2, 2 * 128 * 8 * 2 + 128 * 1000 * (2 + 4 + 4 + 4)
    assert loss_bytes(model(head), during()) == (kept, working)
    # A trained head of float32 is cast, and sums its gradient in float32.
    trained = replace(head, dtype="float32", is_trained=True)
    assert loss_bytes(model(trained), during()) == (kept, working + 8000 * 2 + 8000 * 4)
    whole = replace(FACTS, has_whole_logits=True)
    logits = 128 * 1000 * 2
    assert loss_bytes(model(head, facts=whole), during(whole)) == (128 * 36 + 3 * logits, 2 * logits + 128 * 1000 * 12)


def test_a_gpu_takes_larger_parts_of_the_logits() -> None:
    facts = replace(FACTS, vocabulary_size=100_000)
    sizes = [loss_bytes(model(facts=facts), during(facts, on_gpu=on_gpu))[1] for on_gpu in (False, True)]
    assert sizes == [4096 + 64 * 100_000 * 14, 4096 + 128 * 100_000 * 14]
    # 2^27 / 128,256, and at least 64 rows.
    assert [rows_per_part(128_256, device) for device in ("cuda", "cpu")] == [1046, 64]


# --- optimizers ---


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"optimizer": "AdamW"}, 2 * 100 + 3 * 4),
        ({"optimizer": "RAdam"}, 2 * 100 + 3 * 4),
        ({"optimizer": "SGD", "momentum": "0.9"}, 100),
        ({"optimizer": "SGD", "momentum": "0"}, 0),
    ],
)
def test_state_of_100_bytes_in_three_tensors(written: dict[str, str], expected: int) -> None:
    job = small_job()
    for name, value in written.items():
        job = job.spec(f"training.{name}", value)
    assert state_bytes(job.plan().training, 100, 3) == expected


# --- limits ---


def verdict(limit: int, host: int | None = None) -> MemoryVerdict:
    found = Estimate((Term("a", 100, ""),), "", (Term("b", 50, ""),))
    return MemoryVerdict(
        a_job().plan(),
        found,
        MemoryLimit(limit, True, ""),
        None,
        None if host is None else MemoryLimit(host, is_device=False, source=""),
    )


def test_what_is_there_to_the_byte_fits() -> None:
    assert [verdict(limit).fits for limit in (99, 100, 101)] == [False, True, True]
    assert [verdict(100, host).exceeds_host for host in (49, 50, 51)] == [True, False, False]


def test_quantities_and_sizes_in_words() -> None:
    assert [quantity_bytes(text) for text in ("1500m", "1000", "1k", "1Ki", "2M", "1Mi", "1.5Gi", "1Ti")] == [
        *(1, 1000, 1000, 1024, 2_000_000, 1_048_576, 1_610_612_736, 1_099_511_627_776)
    ]
    with pytest.raises(ValueError, match="'80 Gigs' is not a quantity"):
        quantity_bytes("80 Gigs")
    assert [format_bytes(count) for count in (1023, 1024, 1536, 1_048_576, GIB)] == [
        *("1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB")
    ]


def test_rows_are_padded_to_a_multiple_of_eight() -> None:
    job = small_job().spec("data.packing", False)
    assert [workload(job.plan(), None, longest).length for longest in (1, 8, 9, 13, 5000)] == [8, 8, 16, 16, 2048]
    assert workload(job.spec("data.maxSequenceLength", 2041).plan(), None).length == 2048
    assert workload(small_job().spec("data.packing", True).plan(), None, 13).length == 2048


# --- the terms of an estimate ---


def test_what_is_assumed_of_a_device_and_a_process() -> None:
    found = judged(small_job()).estimate
    assert term(found, "CUDA context") == 1_073_741_824
    rest = sum(each.bytes for each in found.terms if each.name not in ("CUDA context", "allocator slack"))
    assert term(found, "allocator slack") == int(rest / 20)
    assert {each.name: each.bytes for each in found.host_terms}["process"] == 1_610_612_736


# Ids, positions and labels; cosines and sines of 128 values; the mask.
SHARED = 2048 * 40 + 2 * 2048 * 128 * 2 + 2048 * 2048


def test_inputs_of_layers_are_kept_where_all_is_computed_again() -> None:
    found = judged(small_job().spec("training.activationCheckpointing", "Full")).estimate
    assert term(found, "activations") == SHARED + 32 * 2048 * 4096 * 2


def test_products_and_inputs_are_kept_where_the_rest_is_computed_again() -> None:
    found = judged(small_job().spec("training.activationCheckpointing", "Selective")).estimate
    outputs = 4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096
    # Attention's result and the logarithm of its sums; results of the base, to which the second factor's are added where they
    # are, and of the first factor, r is 16, in 2 bytes.
    a_token = 32 * (128 * 2 + 4) + outputs * 2 + 7 * 16 * 2
    assert term(found, "activations") == SHARED + 32 * 2048 * (a_token + 4096 * 2)


TINY = (
    weight((100, 8), name="model.embed_tokens.weight", kind="embedding"),
    weight((16, 8), name="model.layers.0.mlp.up_proj.base_layer.weight"),
    weight((2, 8), "float32", trained=True, name="model.layers.0.mlp.up_proj.lora_A.default.weight"),
    weight((16, 2), "float32", trained=True, name="model.layers.0.mlp.up_proj.lora_B.default.weight"),
)


def terms(job: JobBuilder, moment: str) -> dict[str, int]:
    shape = ModelShape(TINY, (), FACTS)
    work = Workload(rows=1, length=8, has_mask=True, on_gpu=True)
    estimator = _Estimator(job.plan(), shape, PLAIN, work, read_layers(shape))
    return {each.name: each.bytes for each in getattr(estimator, moment)()}


def test_a_packed_base_is_whole_until_it_is_sharded_only_if_it_cannot_be_loaded_by_shards() -> None:
    job = small_job().spec("method.type", "QLoRA").processes_per_node(4)
    assert terms(job, "_loading") == {"packed weights": 0}
    # 1600 and 64 bytes; a quarter of the rows of each stays: 400 and 16.
    whole = job.spec("model.allowRemoteCode", True)
    assert terms(whole, "_loading") == {"packed weights": 1664 - 416}


def test_whole_weights_in_passing() -> None:
    # Of a weight of 16 x 8: it, and for norms B @ A, the same scaled, the sum, and a matrix of ones of 8 x 8.
    norms = 3 * 128 + 64
    for kind, unpacked, temporary in (("LoRA", 0, 0), ("QLoRA", 128, 0), ("DoRA", 0, norms), ("QDoRA", 128, norms)):
        found = terms(small_job().spec("method.type", kind), "_backward")
        assert found["unpacked weights"] == unpacked * 2
        assert found["temporary"] == max(terms(small_job(), "_backward")["temporary"], temporary * 2)
        assert (found["temporary"] == norms * 2) is (kind in {"DoRA", "QDoRA"})


def test_gradients_of_earlier_micro_batches() -> None:
    once, twice = (small_job().spec("training.globalBatchSize", size) for size in (1, 2))
    assert terms(once, "_forward")["gradients"] == 0
    # 16 and 32 values of float32.
    assert terms(twice, "_forward")["gradients"] == 48 * 4


def test_gradients_at_the_end_are_all_but_the_first_layers() -> None:
    for ranks in (1, 2):
        job = small_job().spec("training.globalBatchSize", 2).processes_per_node(ranks)
        assert terms(job, "_backward_end")["gradients"] == 0


def test_an_update_over_all_tensors_makes_results_in_between() -> None:
    for optimizer, size in (("AdamW", 0), ("SGD", 2 * 48 * 4), ("RAdam", 2 * 48 * 4)):
        assert terms(small_job().spec("training.optimizer", optimizer), "_step")["temporary"] == size


def test_a_snapshot_is_there_where_it_is_written_meanwhile() -> None:
    # Values, two moments, and two counters.
    for asynchronous, size in ((False, 0), (True, 3 * 48 * 4 + 2 * 4)):
        job = small_job().spec("checkpoint.asynchronous", asynchronous)
        on_cpu, on_gpu = (Workload(rows=1, length=8, has_mask=True, on_gpu=on_gpu) for on_gpu in (False, True))
        shape = ModelShape(TINY, (), FACTS)
        assert term(estimate(job.plan(), shape, PLAIN, on_cpu), "checkpoint snapshot") == size
        # Of a device it is in host memory. A rank alone holds the whole base there while it is loaded, which is more.
        host_terms = estimate(job.processes_per_node(2).plan(), shape, PLAIN, on_gpu).host_terms
        assert ("checkpoint snapshot" in [each.name for each in host_terms]) is asynchronous


def test_the_mask_of_all_pairs_is_shared_by_all_layers() -> None:
    shape = ModelShape(TINY[:1], (), FACTS)
    sizes = [
        estimate(small_job().plan(), shape, PLAIN, Workload(rows=3, length=16, has_mask=mask, on_gpu=False))
        for mask in (False, True)
    ]
    assert term(sizes[1], "activations") - term(sizes[0], "activations") == 3 * 16 * 16
