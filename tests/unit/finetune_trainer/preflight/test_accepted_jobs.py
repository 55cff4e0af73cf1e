"""What preflight leaves on the workspace and tells the operator about a job that can run."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune_job.api.job import RunSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.failures import Outcome
from finetune_job.plan.resolve import placement_of
from finetune_job.plan.run_plan import Choice
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.errors import PlanMismatchError
from finetune_trainer.files import file_sha256
from finetune_trainer.inspection.report import ModelReport, with_choices_of_preflight
from finetune_trainer.roles.preflight import run


def report_of(context):
    return ModelReport.model_validate_json(context.workspace.model_report.read_text())


def test_data_and_report_are_written_and_facts_reported(context):
    job = context()
    result = run(job)
    weights = sorted(job.base_model.glob("*.safetensors"))
    assert report_of(job).model_files == {path.name: file_sha256(path) for path in (job.base_model / "config.json", *weights)}
    data, report = PreparedData.open(job.workspace.prepared), report_of(job)
    assert (result.outcome, result.failure, result.findings) == (Outcome.SUCCEEDED, None, [])
    wanted = {
        "data_hash": data.data_hash,
        "model_digest": report.model_digest,
        "train_sequences": str(data.train.num_sequences),
        "supervised_tokens": str(data.train.num_supervised_tokens),
        "trainable_parameters": str(report.trainable_parameters),
        "total_steps": "40",
        "wrap_classes": "LlamaDecoderLayer",
        "memory_estimate": str(sum(report.memory.values())),
        "rehearsal": "Skipped",
        "rehearsal_seconds": "0.0",
    }
    assert wanted.items() <= result.facts.items()
    assert (report.plan_sha256, report.data_hash, report.warnings) == (job.plan_sha256, data.data_hash, ())
    assert sorted(path.name for path in job.workspace.root.iterdir()) == ["preflight.json", "prepared"]


@pytest.mark.parametrize(("memory", "frees"), [("8Gi", False), ("2Gi", True), (None, True)])
def test_whether_gathered_parameters_are_freed_is_chosen_by_the_memory_of_a_rank(context, memory, frees):
    job = context({"parallelism.processesPerNode": 2})
    if memory is not None:
        profile = FineTuneProfileSpec.model_validate({"trainerImage": "t", "resources": {"train": {"memory": memory}}})
        job = replace(job, plan=job.plan.model_copy(update={"placement": placement_of("small", profile, RunSpec())}))
    result = run(job)
    chosen = report_of(job).resharding
    assert (chosen.field, chosen.value) == ("spec.parallelism.fsdp.reshardAfterForward", frees)
    assert ("profile small" in chosen.reason) is (memory is not None)
    assert Choice.model_validate_json(result.facts["resharding"]) == chosen
    assert with_choices_of_preflight(job.plan, job.workspace.model_report).parallelism.fsdp.reshard_after_forward is frees


def test_the_report_says_what_is_trained_and_what_the_adapter_must_contain(context):
    job = context({"method.lora.targetModules": ["q_proj"]})
    run(job)
    report = report_of(job)
    # Two layers, hidden size 32, rank 8: A is 8 x 32 and B 32 x 8 in each.
    shapes = {
        f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{m}": s
        for n in (0, 1)
        for m, s in (("A", (8, 32)), ("B", (32, 8)))
    }
    assert report.trainable == {f"{name}.default.weight": shape for name, shape in shapes.items()}
    assert report.saved_tensors == {f"{name}.weight": shape for name, shape in shapes.items()}
    assert report.trainable_parameters == 4 * 8 * 32
    assert report.fsdp_units == ("base_model.model.model.layers.0", "base_model.model.model.layers.1")
    assert report.dtypes == {"load": "float32", "param": "as held", "reduce": "float32", "save": "float32"}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("method", ["LoRA", "DoRA", "QLoRA", "QDoRA"])
def test_every_method_is_accepted_with_its_defaults(context, method, version):
    job = context({"method.type": method, "parallelism.fsdp.version": version, "model.dtype": "bfloat16"})
    assert run(job).outcome is Outcome.SUCCEEDED
    magnitudes = [name for name in report_of(job).saved_tensors if "magnitude" in name]
    assert bool(magnitudes) is (method in {"DoRA", "QDoRA"})


def test_a_flat_unit_of_base_and_adapter_is_held_in_one_element_type(context):
    fsdp = {"version": 1, "peftWrapPolicy": False, "useOrigParams": True}
    assert run(context({"parallelism.fsdp": fsdp, "model.dtype": "bfloat16"})).outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("init", ["ZeroB", "gaussian", "orthogonal", "Random", "olora"])
def test_layers_exclusions_and_first_values_are_peft_s_own_and_can_be_merged(context, init):
    targets = ["q_proj", "k_proj", "down_proj", "up_proj"]
    lora = {"targetModules": targets, "layersToTransform": [1], "excludeModules": ["q_proj"], "initLoraWeights": init}
    job = context({"method.lora": lora})
    assert run(job).outcome is Outcome.SUCCEEDED
    adapted = {name.split(".lora_")[0] for name in report_of(job).trainable}
    assert len(adapted) == 3
    assert all("layers.1." in name and "q_proj" not in name for name in adapted)
    # The file has twice the rank where the adapter starts from the base's weights.
    for name, shape in report_of(job).saved_tensors.items():
        dimension = "lora_B" in name
        trained = report_of(job).trainable[name.replace(".weight", ".default.weight")]
        assert shape[dimension] == trained[dimension] * (2 if init == "olora" else 1)


@pytest.mark.parametrize("version", [1, 2])
def test_other_methods_are_accepted_and_their_settings_read(context, version):
    settings = {"r": 4, "alpha": 8, "targetModules": ["q_proj"], "moduleDropout": "0.25"}
    job = context({"method": {"type": "LoHa", "settings": settings}, "merge.enabled": False, "parallelism.fsdp.version": version})
    assert run(job).outcome is Outcome.SUCCEEDED
    report = report_of(job)
    assert {name.rsplit(".", 2)[1] for name in report.trainable} == {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
    assert all(".q_proj." in name for name in report.trainable)
    assert len(report.saved_tensors) == len(report.trainable) == 8


def test_a_method_without_settings_adapts_every_linear_layer(context):
    job = context({"method": {"type": "LoKr"}, "merge.enabled": False})
    run(job)
    assert {name.split(".")[-3] for name in report_of(job).trainable} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_an_adapter_with_fixed_tensors_can_be_merged(context):
    """VeRA's random projections are not trained, but the merge needs them."""
    job = context({"method": {"type": "VeRA", "settings": {"r": 4}}})
    assert run(job).outcome is Outcome.SUCCEEDED
    assert not any("vera_A" in name for name in report_of(job).saved_tensors)


def test_full_fine_tuning_trains_everything(context):
    job = context({"method": {"type": "Full"}})
    assert run(job).outcome is Outcome.SUCCEEDED
    report = report_of(job)
    assert report.trainable == report.saved_tensors
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(report.trainable)


def test_a_module_saved_whole_is_part_of_the_adapter(context):
    job = context({"method.lora.modulesToSave": ["lm_head"]})
    run(job)
    assert report_of(job).saved_tensors["base_model.model.lm_head.weight"][1] == 32


def test_epochs_become_steps(context):
    job = context({"training.maxSteps": None, "training.epochs": 3})
    run(job)
    report = report_of(job)
    assert report.total_steps == math.ceil(3 * report.train_sequences / 8)


def test_a_second_preflight_reuses_the_data_and_says_the_same(context):
    job = context()
    first = run(job)
    written = (job.workspace.prepared / "manifest.json").stat().st_mtime_ns
    assert run(job).facts == first.facts
    assert (job.workspace.prepared / "manifest.json").stat().st_mtime_ns == written


def test_dropped_records_are_a_warning_that_is_kept(context):
    job = context({"data.maxSequenceLength": 28})
    result = run(job)
    assert result.outcome is Outcome.SUCCEEDED
    assert [(finding.rule, finding.severity) for finding in result.findings] == [("data-records-dropped", "warning")] * 2
    assert [finding.rule for finding in report_of(job).warnings] == ["data-records-dropped"] * 2


def test_the_model_digest_changes_with_config_headers_and_sizes_only(context, model):
    digests = [run(context()).facts["model_digest"] for _ in range(2)]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    digests.append(run(context()).facts["model_digest"])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (
            "bfloat16",
            {"maxKlDivergence": "5e-4", "minTop1Agreement": "1"},
            {"maxKlDivergence": "1e-3", "minTop1Agreement": "0.97"},
        ),
        ("float16", {"maxKlDivergence": "1e-5", "minTop1Agreement": "0.995"}, {"maxKlDivergence": "2e-5"}),
        (
            "float32",
            {"maxKlDivergence": "1e-12", "minTop1Agreement": "1"},
            {"maxKlDivergence": "1e-9", "minTop1Agreement": "0.999"},
        ),
    ],
)
def test_thresholds_that_rounding_alone_may_miss_are_a_warning(context, dtype, within, beyond):
    """By the element type of the merge: the base is float32."""
    job = context({"merge.dtype": dtype, "merge.verify": within})
    assert run(job).outcome is Outcome.SUCCEEDED
    warned = {finding.field: finding for finding in report_of(job).warnings}
    assert set(warned) == {f"spec.merge.verify.{name}" for name in within}
    assert all(dtype in finding.message and finding.severity == "warning" for finding in warned.values())
    job = context({"merge.dtype": dtype, "merge.verify": beyond})
    run(job)
    assert report_of(job).warnings == ()


@pytest.mark.parametrize(("memory", "expected"), [("8Gi", [8, "None"]), ("1Gi", [1, "Full"]), (None, [8, "None"])])
def test_what_a_rank_computes_at_once_is_chosen_by_its_memory(context, memory, expected):
    job = context({"training.globalBatchSize": 8, "parallelism.processesPerNode": 1})
    if memory is not None:
        profile = FineTuneProfileSpec.model_validate({"trainerImage": "t", "resources": {"train": {"memory": memory}}})
        job = replace(job, plan=job.plan.model_copy(update={"placement": placement_of("small", profile, RunSpec())}))
    result = run(job)
    chosen = report_of(job).batches
    assert [choice.value for choice in chosen] == expected
    assert [Choice.model_validate(each) for each in json.loads(result.facts["batches"])] == list(chosen)
    training = with_choices_of_preflight(job.plan, job.workspace.model_report).training
    assert [training.micro_batch_size, training.activation_checkpointing.value] == expected
    assert training.gradient_accumulation_steps == 8 // expected[0]


def test_an_open_global_batch_is_what_the_records_fill(context, claims):
    file = claims / "data/train.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:11]))
    steps = {"training.epochs": 2, "training.maxSteps": None, "training.globalBatchSize": None}
    job = context({**steps, "data.packing": False, "parallelism.processesPerNode": 2})
    run(job)
    report = report_of(job)
    chosen = {choice.field: choice.value for choice in report.batches}
    assert [chosen[f"spec.training.{name}BatchSize"] for name in ("global", "micro")] == [10, 5]
    assert (report.train_sequences, report.total_steps) == (11, 3)
    training = with_choices_of_preflight(job.plan, job.workspace.model_report).training
    assert (training.global_batch_size, training.micro_batch_size, training.gradient_accumulation_steps) == (10, 5, 1)


@pytest.mark.parametrize(
    ("changes", "value", "reason"),
    [
        ({"training.precision": "bf16"}, "varlen", "needs no mask"),
        ({}, "sdpa", "this job computes in float32"),
        ({"model.attention": "sdpa"}, None, ""),
    ],
)
def test_attention_on_a_gpu_is_chosen_by_model_and_precision(context, changes, value, reason):
    profile = FineTuneProfileSpec.model_validate({"trainerImage": "t", "gpu": {"memory": "80Gi"}})
    job = context({"training.microBatchSize": 1, "training.activationCheckpointing": "None", **changes}, profile=profile)
    result = run(job)
    batches = [each for each in report_of(job).batches if each.field != "spec.training.precision"]
    assert [(each.field, each.value) for each in batches] == [("spec.model.attention", value)] * bool(value)
    assert reason in result.facts.get("batches", "")
    assert with_choices_of_preflight(job.plan, job.workspace.model_report).model.attention == (value or "sdpa")
    if value:
        path = job.workspace.model_report
        written = json.loads(path.read_text())
        for forged in ("eager", "flash_attention_2", 1, None):
            path.write_text(json.dumps({**written, "batches": [{**written["batches"][-1], "value": forged}]}))
            with pytest.raises(PlanMismatchError, match=r"says spec\.model\.attention"):
                with_choices_of_preflight(job.plan, path)


@pytest.mark.parametrize(
    ("stored", "changes", "value", "is_cast"),
    [
        ("bfloat16", {"method.type": "DoRA"}, "bf16", True),
        ("bfloat16", {"method": {"type": "OFT"}}, "bf16", True),
        ("bfloat16", {}, "bf16", False),
        ("float32", {"method.type": "DoRA"}, "fp32", False),
        ("float16", {"method.type": "DoRA"}, "float16", False),
        ("float32", {"method.type": "DoRA", "training.precision": "bf16"}, None, True),
        ("float32", {"method.type": "DoRA", "parallelism.fsdp.mixedPrecision.paramDtype": "bfloat16"}, None, True),
    ],
)
def test_precision_on_a_gpu_is_chosen_by_the_base(context, stored, changes, value, is_cast):
    profile = FineTuneProfileSpec.model_validate({"trainerImage": "t", "gpu": {"memory": "80Gi"}})
    written = {"training.microBatchSize": 1, "training.activationCheckpointing": "None", "model.attention": "sdpa", **changes}
    job = context(written, profile=profile)
    for file in job.base_model.glob("*.safetensors"):
        tensors = {name: tensor.to(getattr(torch, stored)) for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    run(job)
    batches = report_of(job).batches
    assert [(each.field, each.value) for each in batches] == [("spec.training.precision", value)] * bool(value)
    chosen = with_choices_of_preflight(job.plan, job.workspace.model_report)
    assert chosen.parallelism.fsdp.param_dtype == ("bfloat16" if is_cast else None)
    assert report_of(job).dtypes["param"] == ("bfloat16" if is_cast else "as held")
    if value:
        path = job.workspace.model_report
        told = json.loads(path.read_text())
        for forged in ("float64", "int8", 1, None, ["bf16"]):
            path.write_text(json.dumps({**told, "batches": [{**told["batches"][0], "value": forged}]}))
            with pytest.raises(PlanMismatchError, match=r"says spec\.training\.precision"):
                with_choices_of_preflight(job.plan, path)


def test_a_report_that_something_else_has_written_is_refused_by_name(context):
    job = context({"training.globalBatchSize": 8, "parallelism.processesPerNode": 2})
    run(job)
    path = job.workspace.model_report
    written = json.loads(path.read_text())
    micro, recomputed = written["batches"]
    forged = [
        *({"batches": [{**micro, "value": value}]} for value in (0, -1, 3, 8, 10**9, "4", 4.0, True, None)),
        *({"batches": [{**recomputed, "value": value}]} for value in ("Some", 1, None, ["Full"])),
        {"resharding": {"field": "spec.parallelism.fsdp.reshardAfterForward", "value": "false", "reason": ""}},
    ]
    for change in forged:
        path.write_text(json.dumps({**written, **change}))
        with pytest.raises(
            PlanMismatchError, match=r"preflight.json on the workspace says spec\.\w+.* another program has written it"
        ):
            with_choices_of_preflight(job.plan, path)
    path.write_text("[]")
    with pytest.raises(PlanMismatchError, match=r"preflight.json on the workspace is not a report"):
        with_choices_of_preflight(job.plan, path)
    for value in (1, 2, 4):
        path.write_text(json.dumps({**written, "batches": [{**micro, "value": value}]}))
        assert with_choices_of_preflight(job.plan, path).training.micro_batch_size == value


@pytest.mark.parametrize("changes", [{}, {"method": {"type": "Full"}}], ids=["LoRA", "Full"])
def test_a_large_model_without_a_gpu_is_warned_of_by_its_tensors(context, monkeypatch, changes):
    monkeypatch.setattr("finetune_job.device.LARGE_PARAMETERS", 1000)
    job = context(changes)
    assert report_of_run(job) == []
    for gpu, expected in (({}, ["large-model-on-cpu"]), ({"gpu": {}}, [])):
        profile = FineTuneProfileSpec.model_validate({"trainerImage": "t", **gpu})
        placed = job.plan.model_copy(update={"placement": placement_of("small", profile, RunSpec())})
        assert report_of_run(replace(job, plan=placed)) == expected


def report_of_run(job):
    run(job)
    return [finding.rule for finding in report_of(job).warnings]
