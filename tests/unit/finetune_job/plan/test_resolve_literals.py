"""What a plan says where the manifest says nothing, written by hand; documentation and papers name the same values."""

from typing import Any

import pytest

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.plan.digest import learning_sha256
from finetune_job.plan.element_types import Elements, held_dtype, resolve_elements
from finetune_job.plan.resolve import resolve
from finetune_job.plan.resolve_training import micro_batch_sizes
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from tests.support.cases import table
from tests.unit.finetune_job.rules.manifests import manifest

IDENTITY = JobIdentity(namespace="n", name="j", uid="0123456789abcdef")
FULL, FSDP1 = {"method.type": "Full"}, {"parallelism.fsdp.version": 1, "parallelism.processesPerNode": 2}


def plan_of(**changes: Any) -> RunPlan:
    return planned(changes)


def planned(changes: dict[str, Any]) -> RunPlan:
    return resolve(IDENTITY, FineTuneJobSpec.model_validate(manifest(changes)), None)


def test_training_that_nobody_has_set():
    training = plan_of().training
    assert (training.learning_rate, training.warmup_ratio, training.weight_decay, training.max_grad_norm) == (2e-4, 0.03, 0, 1)
    assert (training.optimizer, training.scheduler, training.activation_checkpointing) == ("AdamW", "Cosine", "None")
    assert (training.adam_betas, training.adam_epsilon, training.momentum) == ((0.9, 0.999), 1e-8, 0.9)
    assert (training.min_learning_rate_ratio, training.decay_ratio) == (0, 0.2)
    assert planned(FULL).training.learning_rate == 2e-5


def test_moments_are_what_is_written():
    written = {
        "training.adamBeta1": "0.8",
        "training.adamBeta2": "0.95",
        "training.adamEpsilon": "1e-6",
        "training.momentum": "0.5",
    }
    training = planned(written).training
    assert (training.adam_betas, training.adam_epsilon, training.momentum) == ((0.8, 0.95), 1e-6, 0.5)


@pytest.mark.parametrize(
    ("per_rank", "chosen"), [(0, 1), (1, 1), (2, 2), (6, 6), (7, 7), (8, 8), (9, 3), (12, 6), (16, 8), (11, 1), (64, 8), (22, 2)]
)
def test_the_micro_batch_is_the_largest_divisor_up_to_eight(per_rank, chosen):
    assert micro_batch_sizes(per_rank)[0] == chosen


def test_a_rank_accumulates_its_share():
    training = planned({"training.globalBatchSize": 96, "parallelism.nodes": 2, "parallelism.processesPerNode": 3}).training
    # 96 / 6 ranks = 16 sequences: two micro-batches of 8.
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (8, 2)


def test_an_adapter_that_nobody_has_set():
    lora = planned({"method.lora.r": 8}).method.lora
    assert (lora.lora_alpha, lora.lora_dropout, lora.target_modules, lora.use_dora) == (16, 0.0, ("all-linear",), False)
    assert planned({"method.type": "DoRA"}).method.lora.use_dora
    assert not planned({"method.type": "QLoRA"}).method.lora.use_dora
    assert planned({"method.lora.targetParameters": ["experts.down_proj"]}).method.lora.target_modules == ()


def test_packing_that_nobody_has_set():
    quantization = planned({"method.type": "QLoRA"}).method.quantization
    assert (quantization.bits, quantization.quant_type, quantization.double_quant) == (4, "nf4", True)
    assert (quantization.compute_dtype, quantization.quant_storage) == (None, None)


def test_sharding_that_nobody_has_set():
    second = plan_of().parallelism.fsdp
    assert (second.version, second.auto_wrap_policy) == (2, "TRANSFORMER_BASED_WRAP")
    assert (second.peft_wrap_policy, second.use_orig_params, second.sync_module_states) == (None, None, None)
    assert (second.param_dtype, second.reduce_dtype) == (None, "float32")
    first = planned(FSDP1).parallelism.fsdp
    # Adapters are leaf modules and become units, so that no unit is trained in part.
    assert (first.peft_wrap_policy, first.use_orig_params, first.sync_module_states) == (True, False, True)
    assert first.reshard_after_forward is None
    rows = planned(FSDP1 | {"method.lora.trainableTokenIndices": [3]}).parallelism.fsdp
    assert (rows.peft_wrap_policy, rows.use_orig_params) == (True, True)
    of_head = FSDP1 | {"model.addedTokens": [{"content": "<a>"}], "method.lora.modulesToSave": ["embed_tokens"]}
    assert planned(of_head).parallelism.fsdp.use_orig_params is True
    assert planned(of_head | {"method.lora.modulesToSave": ["embed_tokens", "lm_head"]}).parallelism.fsdp.use_orig_params is False
    written = planned(FSDP1 | {"parallelism.fsdp.peftWrapPolicy": False}).parallelism.fsdp
    assert (written.peft_wrap_policy, written.use_orig_params) == (False, True)
    assert planned(FSDP1 | {"parallelism.fsdp.peftWrapPolicy": False}).method.lora.autocast_adapter_dtype is False
    assert planned(FSDP1).method.lora.autocast_adapter_dtype is True


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, (True, "trainable and frozen apart")),
        (FULL, (False, "all parameters are trained alike")),
        ({"method.type": "DoRA", "parallelism.fsdp.useOrigParams": True}, (False, "adapters share the units of their layers")),
    ],
)
def test_the_reason_of_a_wrap_policy_fits_the_value(changes, chosen):
    choices = planned(FSDP1 | changes).choices
    assert [(each.value, each.reason) for each in choices if each.field == "spec.parallelism.fsdp.peftWrapPolicy"] == [chosen]


@pytest.mark.parametrize("given", [True, False])
def test_freeing_parameters_after_the_forward_pass_is_left_to_preflight_unless_it_is_set(given):
    field = "parallelism.fsdp.reshardAfterForward"
    ranks = {"parallelism.processesPerNode": 2}
    unset, written = planned(ranks), planned({**ranks, field: given})
    assert unset.parallelism.fsdp.reshard_after_forward is None
    (choice,) = (choice for choice in unset.choices if choice.field == f"spec.{field}")
    assert (choice.value, choice.reason) == (None, "preflight chooses: false if a rank has memory for all weights, else true")
    assert written.parallelism.fsdp.reshard_after_forward is given
    assert f"spec.{field}" not in {choice.field for choice in written.choices}
    assert unset.parallelism.leaves_resharding_open
    assert not written.parallelism.leaves_resharding_open
    assert not plan_of().parallelism.leaves_resharding_open
    assert not planned({**ranks, **FSDP1}).parallelism.leaves_resharding_open


@pytest.mark.parametrize("given", [None, "sdpa", "varlen"])
@pytest.mark.parametrize("gpu", [{}, None])
def test_attention_is_left_to_preflight_on_a_gpu_alone(gpu, given):
    profile = FineTuneProfileSpec.model_validate({"trainerImage": "t", **({} if gpu is None else {"gpu": gpu})})
    spec = FineTuneJobSpec.model_validate(manifest({"model.attention": given} if given else {}))
    plan = resolve(IDENTITY, spec, profile)
    chosen = [(one.value, one.reason[:17]) for one in plan.choices if one.field == "spec.model.attention"]
    is_open = given is None and gpu is not None
    assert plan.model.attention == (given or "sdpa")
    assert plan.leaves_attention_open is is_open
    assert chosen == ([] if given else [(None, "preflight chooses")] if is_open else [("sdpa", "keeps packed docu")])


@pytest.mark.parametrize(("changes", "is_fused"), table(__file__, "test_lora_has_a_forward_pass_of_its_own_on_a_gpu_alone"))
def test_lora_has_a_forward_pass_of_its_own_on_a_gpu_alone(changes, is_fused):
    spec = FineTuneJobSpec.model_validate(manifest(changes))
    profiles = {gpu: FineTuneProfileSpec.model_validate({"trainerImage": "t", **({"gpu": {}} if gpu else {})}) for gpu in (0, 1)}
    on_gpu, on_cpu = resolve(IDENTITY, spec, profiles[1]), resolve(IDENTITY, spec, profiles[0])
    assert (on_gpu.method.lora.fused_forward, on_cpu.method.lora.fused_forward) == (is_fused, False)
    assert planned(changes).method.lora.fused_forward is False
    assert [each.value for each in on_gpu.choices if each.field == "spec.method.lora.peftForward"] == [False] * is_fused
    reasons = [each.reason for each in on_gpu.choices if each.field == "spec.method.lora.autocastAdapterDtype"]
    is_open = "method.lora.autocastAdapterDtype" not in changes
    assert reasons == ["small updates vanish in 16 bits" + "; products take rounded copies" * is_fused] * is_open


def test_the_type_of_products():
    bf16 = {"training.precision": "bf16"}
    assert planned(bf16).parallelism.fsdp.param_dtype == "bfloat16"
    assert planned(bf16 | {"model.dtype": "float32"}).parallelism.fsdp.param_dtype is None
    assert planned({"training.precision": "fp32"}).parallelism.fsdp.param_dtype is None


def test_what_is_merged_kept_and_saved():
    assert plan_of().merge.enabled
    assert not planned(FULL).merge.enabled
    assert plan_of().keeps_adapter
    assert not planned({"output.adapter": False}).keeps_adapter
    assert planned({"output.adapter": False, "merge.enabled": False}).keeps_adapter
    assert plan_of().checkpoint.asynchronous is False
    assert planned(FULL).checkpoint.asynchronous is True


def test_sample_answers_show_held_out_records_to_nobody_who_has_not_been_named():
    held_out = {"data.validation": {"source": "pvc://data/held-out.jsonl"}}
    assert planned(held_out).sample_answers == 3
    assert planned(held_out | {"output.destination": "s3://results/p"}).sample_answers == 3
    for destination in ("hf://team/tuned", "oci://r.test/a/b:v1"):
        plan = planned(held_out | {"output.destination": destination})
        (choice,) = (choice for choice in plan.choices if choice.field == "spec.output.sampleAnswers")
        assert (plan.sample_answers, choice.value) == (0, 0)
        assert "may not see the data" in choice.reason
        assert planned(held_out | {"output.destination": destination, "output.sampleAnswers": 5}).sample_answers == 5
    assert planned(held_out | {"output.sampleAnswers": 0}).sample_answers == 0
    assert plan_of().sample_answers == 0


def test_what_of_records_is_learnt():
    for kind, learnt in (("Chat", "Assistant"), ("PromptCompletion", "Completion"), ("Text", "All")):
        assert planned({"data.format": kind}).data.loss_on == learnt


def test_each_data_set_has_its_own_weight_and_revision():
    commit = "0123456789abcdef0123456789abcdef01234567"
    sets = [{"source": "pvc://data/a", "weight": "0.5"}, {"source": "hf://datasets/o/b", "revision": commit}]
    plan = planned({"data.source": None, "data.datasets": sets})
    assert [(each.source, each.weight) for each in plan.data.train] == [("pvc://data/a", 0.5), ("hf://datasets/o/b", 1.0)]
    (item,) = plan.fetch.items
    assert (item.source, item.revision, item.target.path.rpartition("/")[2]) == ("hf://datasets/o/b", commit, "data-1")


def elements(stored: str, **changes: Any) -> tuple[str, str | None, bool]:
    found = resolve_elements(planned(changes), stored)
    return found.load, found.param, found.casts_parameters


TWO = {"parallelism.processesPerNode": 2}
BF16 = {"training.precision": "bf16"}


@pytest.mark.parametrize(
    ("stored", "changes", "expected"),
    [
        ("bfloat16", {}, ("bfloat16", None, False)),
        ("bfloat16", TWO, ("bfloat16", None, True)),
        ("bfloat16", FSDP1, ("bfloat16", None, False)),
        # One rank has no cast of FSDP: a float16 base is held in the type of its products, a float32 one as it is.
        ("float16", BF16, ("bfloat16", "bfloat16", False)),
        ("float32", BF16, ("float32", "bfloat16", False)),
        ("float16", BF16 | TWO, ("float16", "bfloat16", True)),
        ("bfloat16", {"training.precision": "fp32"}, ("float32", None, False)),
        ("bfloat16", FULL | TWO, ("float32", "bfloat16", True)),
        ("float32", FULL | TWO, ("float32", None, True)),
        # Whole modules that are trained are float32 and compute in the type of the base around them.
        ("bfloat16", {"method.lora.modulesToSave": ["norm"]} | TWO, ("bfloat16", "bfloat16", True)),
    ],
)
def test_element_types(stored, changes, expected):
    assert elements(stored, **changes) == expected


def test_the_type_of_a_base_is_known_where_every_stored_one_comes_to_the_same():
    assert held_dtype(plan_of()) is None
    assert held_dtype(planned({"model.dtype": "float16"})) == "float16"
    assert held_dtype(planned({"training.precision": "fp32"})) == "float32"
    assert held_dtype(planned(BF16)) is None


def test_bytes_of_what_layers_hand_on():
    autocast = Elements("float32", "bfloat16", None, "float32", casts_parameters=False)
    sharded = Elements("float32", "bfloat16", None, "float32", casts_parameters=True)
    plain = Elements("bfloat16", None, None, "bfloat16", casts_parameters=True)
    assert [(each.stream, each.product) for each in (autocast, sharded, plain)] == [(4, 2), (2, 2), (2, 2)]
    assert [each.layers_copy_input for each in (autocast, sharded, plain)] == [True, False, False]
    assert [each.adapter("float32") for each in (autocast, sharded, plain)] == [2, 2, 4]
    # Autocast copies a float32 stream for products of 16 bits; nobody casts for float32 adapters on a 16-bit stream but they.
    assert [each.adapter_copies_input("float32") for each in (autocast, sharded, plain)] == [True, False, True]
    assert not plain.adapter_copies_input("bfloat16")


def test_what_a_run_learns_does_not_depend_on_how_fast():
    same = [
        {"training.microBatchSize": 4},
        {"training.activationCheckpointing": "Full"},
        {"training.trackers": ["tensorboard"]},
        {"output.sampleAnswers": 7},
        TWO,
    ]
    other = [{"method.lora.trainableTokenIndices": [3]}, {"training.seed": 7}, {"training.learningRate": "1e-4"}]
    base = learning_sha256(plan_of())
    assert [learning_sha256(planned(changes)) == base for changes in same] == [True] * 5
    assert [learning_sha256(planned(changes)) == base for changes in other] == [False] * 3


@pytest.mark.parametrize(
    ("written", "planned_as"), [("oci://r.test/a/b", "oci://r.test/a/b:latest"), ("oci://r.test/a/b:v1", "oci://r.test/a/b:v1")]
)
def test_a_registry_gets_a_tag(written, planned_as):
    plan = planned({"output.destination": written})
    assert plan.publish.destination == planned_as
    assert [choice.value for choice in plan.choices if choice.field == "spec.output.destination"] == (
        [planned_as] if written != planned_as else []
    )


@pytest.mark.parametrize(
    ("run", "queue", "place_in_queue", "priority"),
    [
        ({"queueName": "gpus", "priorityClassName": "high"}, "gpus", "high", None),
        ({"priorityClassName": "high"}, None, None, "high"),
        ({"queueName": "gpus"}, "gpus", None, None),
    ],
)
def test_the_priority_of_a_job_is_its_place_in_a_queue_where_it_has_one(run, queue, place_in_queue, priority):
    spec = FineTuneJobSpec.model_validate(manifest({f"run.{name}": value for name, value in run.items()}))
    plan = resolve(IDENTITY, spec, FineTuneProfileSpec(trainer_image="trainer@sha256:0"))
    train = plan.placement.pods.train
    assert (train.queue_name, train.queue_priority_class_name, train.priority_class_name) == (queue, place_in_queue, priority)
    assert plan.placement.pods.merge.queue_name is None
