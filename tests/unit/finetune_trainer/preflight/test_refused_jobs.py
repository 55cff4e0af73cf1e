"""What preflight refuses: named with field, value, reason and fix; all of it at once; and nothing half-written left behind."""

import json
import os

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from finetune_job.failures import FailureClass, Outcome
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.roles.preflight import run
from finetune_trainer.weights.errors import UnsupportedBaseError
from tests.unit.finetune_trainer.preflight.test_added_tokens import tie


def refusal(job):
    """The findings of a refused job, by rule; the workspace must stay as it was."""
    before = sorted(job.claims_root.rglob("*"))
    result = run(job)
    assert result.outcome is Outcome.REFUSED
    assert sorted(job.claims_root.rglob("*")) == before
    assert all(finding.field.startswith("spec.") and finding.message and finding.fix for finding in result.findings)
    assert result.findings_total == len(result.findings)
    assert result.message
    assert result.hint
    return {finding.rule: finding for finding in result.findings}


def only(job, rule):
    findings = refusal(job)
    assert list(findings) == [rule]
    return findings[rule]


def only_of_model(job, rule):
    """The one finding about the job's model, without what else preflight looks at."""
    (finding,) = check_model(job.plan, job.base_model)[1]
    assert (finding.rule, finding.severity) == (rule, "error")
    return finding


# Settings that do not fit the model


def loha(settings, **changes):
    return {"method": {"type": "LoHa", "settings": settings}, "merge.enabled": False, **changes}


@pytest.mark.parametrize(
    ("changes", "rule", "field", "value", "fix"),
    [
        (loha({"r": "8"}), "method-setting-invalid", "settings.r", "8", "a whole number"),
        (loha({"moduleDropout": "much"}), "method-setting-invalid", "settings.moduleDropout", "much", "a number in quotes"),
        (loha({"initWeights": 1}), "method-setting-invalid", "settings.initWeights", "1", "true or false"),
        (loha({"targetModule": ["q_proj"]}), "method-setting-invalid", "settings.targetModule", "['q_proj']", "targetModules"),
        ({"method": {"type": "MiSS"}, "merge.enabled": False}, "model-settings-conflict", "settings.r", "64 (the default)",
         "write a smaller number, or"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_method_or_the_model_are_refused(context, changes, rule, field, value, fix):
    finding = only_of_model(context(changes), rule)
    assert (finding.field, finding.value) == (f"spec.method.{field}", value)
    assert fix in finding.fix


def test_settings_that_peft_refuses_for_this_model_are_refused(context):
    """The model has sides of 32, 16 and 64."""
    job = context({"method": {"type": "BOFT", "settings": {"boftBlockSize": 7}}, "merge.enabled": False})
    finding = only_of_model(job, "model-settings-conflict")
    assert (finding.field, finding.value) == ("spec.method.settings.boftBlockSize", "7")
    assert finding.message.startswith("PEFT refuses it for the layers of this model: in_features (32) must be divisible by")
    assert finding.fix.startswith("write a divisor of 16, or name in spec.method.settings.targetModules only layers")


def test_adapters_that_fsdp1_would_hold_in_16_bits_are_refused_by_what_is_stored(context, model):
    in_16_bits = LlamaForCausalLM.from_pretrained(model, dtype="bfloat16")
    for path in model.glob("*.safetensors*"):
        path.unlink()
    in_16_bits.save_pretrained(model)
    finding = only_of_model(context(loha({}, **{"parallelism.fsdp.version": 1})), "model-settings-conflict")
    assert (finding.field, finding.value) == ("spec.parallelism.fsdp.version", "1")


# Units that FSDP 1 cannot flatten: rules refuse these too, but only preflight sees the real model


@pytest.mark.parametrize(
    ("changes", "field", "value", "fix"),
    [
        ({"parallelism.fsdp": {"version": 1, "peftWrapPolicy": False, "useOrigParams": False}},
         "useOrigParams", "false", "set peftWrapPolicy: true, or useOrigParams: true, or version: 2"),
        ({"parallelism.fsdp": {"version": 1, "peftWrapPolicy": False, "useOrigParams": True},
          "model.dtype": "bfloat16", "method.lora.autocastAdapterDtype": True},
         "version", "1", "set peftWrapPolicy: true, or version: 2"),
        # The wrap policy gives units to modules with a weight, and LoHa's adapters are parameters beside the layer's own.
        (loha({}, **{"parallelism.fsdp": {"version": 1, "peftWrapPolicy": True, "useOrigParams": False}}),
         "useOrigParams", "false", "set useOrigParams: true, or version: 2"),
    ],
    ids=["frozen and trained", "two element types", "what is on already is not offered"],
)  # fmt: skip
def test_parameters_that_do_not_fit_into_one_flat_unit_are_refused(context, changes, field, value, fix):
    finding = only_of_model(context(changes), "model-settings-conflict")
    assert (finding.field, finding.value, finding.fix) == (f"spec.parallelism.fsdp.{field}", value, fix)
    assert ("bfloat16" in finding.message and "float32" in finding.message) == (field == "version")


# The model's files


def test_a_missing_model_names_what_lies_beside(context):
    job = context({"model.source": "pvc://models/tiny-lama"})
    finding = refusal(job)["model-directory-missing"]
    assert finding.value == "pvc://models/tiny-lama"
    assert "tiny-llama" in finding.message


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "no-such-model"}'])
def test_a_missing_or_foreign_configuration_is_refused(context, model, content):
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    findings = refusal(context())
    assert {"model-config-unreadable", "model-not-accepted"} & set(findings)


def test_weights_that_do_not_fill_the_model_are_refused(context, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "intermediate_size": 72}))
    result = run(context())
    assert result.failure is FailureClass.USER_MODEL
    assert {finding.rule for finding in result.findings} == {"model-weights-incomplete"}
    missing, mismatched = (finding.message for finding in result.findings)
    assert "model.layers.2." in missing
    assert "another shape" in mismatched


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(context, model, value):
    name, file = "model.layers.1.mlp.up_proj.weight", None
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][-1, -1] = value
            save_file(tensors, path, metadata={"format": "pt"})
            file = path.name
    finding = only(context(), "model-weight-not-finite")
    assert (finding.field, finding.value) == ("spec.model.source", name)
    assert f"{name} in {file} holds NaN or infinity" in finding.message


@pytest.mark.parametrize("files", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_missing_tokenizer_is_refused(context, model, files):
    for name in files:
        (model / name).unlink()
    assert "has no tokenizer: no tokenizer.json, nor tokenizer.model" in only(context(), "tokenizer-unusable").message


def test_a_tokenizer_without_an_end_token_is_refused(context, model):
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    only(context(), "tokenizer-without-end")


# The data, and whether it fits


def test_missing_data_is_the_datas_failure(context, claims):
    (claims / "data" / "train.jsonl").unlink()
    job = context()
    assert only(job, "data-file-missing").value == "pvc://data/train.jsonl"
    assert run(job).failure is FailureClass.USER_DATA


@pytest.mark.parametrize(
    ("content", "rule", "said"),
    [
        ("", "data-empty", "no record"),
        ('{"prompt": "p"}\n', "data-record-invalid", "line 1: key 'completion' is missing"),
        ('{"prompt": "p", "completion": ""}\n', "data-record-invalid", "line 1: key 'completion' is empty"),
        ('{"prompt": "p", "completion": NaN}\n', "data-record-invalid", "line 1: is not JSON"),
        (json.dumps({"prompt": "p", "completion": "Return the value. " * 90}), "data-all-too-long", "nothing is left"),
    ],
)
def test_wrong_data_is_refused(context, claims, content, rule, said):
    (claims / "data" / "train.jsonl").write_text(content)
    assert said in only(context(), rule).message


def test_fewer_sequences_than_a_step_takes_are_refused_with_what_would_do(context):
    finding = only(context({"training.globalBatchSize": 120}), "fewer-sequences-than-batch")
    assert (finding.field, finding.value) == ("spec.training.globalBatchSize", "120")
    assert "spec.data.packing: false, which gives 120 sequences" in finding.fix


def test_a_batch_that_is_just_filled_is_accepted(context):
    assert run(context({"training.globalBatchSize": 120, "data.packing": False})).outcome is Outcome.SUCCEEDED


def test_records_longer_than_the_models_positions_are_refused(context, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    assert "to 16 or less" in only(context(), "document-beyond-positions").fix


@pytest.mark.parametrize("settings", [{"targetModules": ["embed_tokens", "q_proj"]}, {"modulesToSave": ["lm_head"]}])
def test_an_adapter_on_tied_embeddings_is_accepted_because_they_are_parted(context, model, settings):
    tie(model)
    assert run(context({"method.lora": settings})).outcome is Outcome.SUCCEEDED


def test_packing_is_refused_where_a_state_would_run_on_from_record_to_record(context, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_is_stateful", True)
    assert only(context(), "packing-with-recurrent-layers").fix == "set spec.data.packing: false"
    assert run(context({"data.packing": False})).outcome is Outcome.SUCCEEDED


# Storage


def test_a_workspace_that_cannot_be_written_is_refused(context, claims):
    (claims / "workspace").rmdir()
    # Even root cannot make files in /proc, so this holds in a container as well.
    (claims / "workspace").symlink_to("/proc")
    assert only(context(), "directory-not-writable").field == "spec.workspace"


def test_a_file_in_place_of_a_directory_is_refused(context, claims):
    (claims / "workspace" / "quickstart-01234567").write_text("")
    assert only(context(), "directory-not-writable").field == "spec.workspace"


def test_claims_that_are_not_mounted_are_refused_both_at_once(context, claims):
    (claims / "workspace").rmdir()
    (claims / "models-out").rmdir()
    result = run(context())
    assert [(finding.rule, finding.field) for finding in result.findings] == [
        ("claim-not-mounted", "spec.workspace"),
        ("claim-not-mounted", "spec.output.destination"),
    ]


def test_anothers_results_are_not_overwritten(context, claims):
    (claims / "models-out" / "quickstart" / "merged").mkdir(parents=True)
    assert "merged" in only(context(), "output-exists").message


def test_a_job_that_has_trained_may_be_checked_again_beside_its_own_results(context, claims):
    job = context()
    (claims / "models-out" / "quickstart" / "merged").mkdir(parents=True)
    job.workspace.adapter.mkdir(parents=True)
    assert run(job).outcome is Outcome.SUCCEEDED


def test_a_base_that_the_verification_cannot_read_is_refused_before_the_training(context, monkeypatch):
    def unreadable(_stored):
        raise UnsupportedBaseError("base parameter gate_proj: transformers makes it from stored tensors by Chunk.")

    monkeypatch.setattr("finetune_trainer.weights.stored.StoredModel.require_readable", unreadable)
    assert "by Chunk" in only(context(), "merge-impossible").message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_room_is_for_the_merged_models_own_type(context, model, monkeypatch, dtype):
    asked = {}

    def room(field, location, root, needed, what):
        asked[what] = needed

    monkeypatch.setattr("finetune_trainer.preflight.job_steps.no_room", room)
    run(context({"merge.dtype": dtype}))
    whole = asked["the results"]
    run(context({"merge.enabled": False}))
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    stored = {"float32": 4, "bfloat16": 2}[json.loads((model / "config.json").read_text())["dtype"]]
    assert whole - asked["the results"] == pytest.approx(weights * {"float32": 4, "bfloat16": 2}[dtype] / stored, rel=0.05)


def test_a_full_claim_is_refused_before_the_run(context, monkeypatch):
    real = os.statvfs

    def full(path):
        found = list(real(path))
        found[4] = 1  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    result = run(context())
    assert [(finding.rule, finding.field) for finding in result.findings] == [
        ("claim-too-small", "spec.workspace"),
        ("claim-too-small", "spec.output.destination"),
    ]


# Everything at once


def test_all_mistakes_are_reported_together_and_the_envelope_holds_them(context, claims, model):
    (claims / "data" / "train.jsonl").write_text('{"prompt": 1, "completion": "c"}\n')
    (claims / "data" / "validation.jsonl").unlink()
    (model / "tokenizer.json").unlink()
    (claims / "models-out").rmdir()
    job = context({"method.lora.targetModules": ["q_porj"], "parallelism.fsdp.transformerLayerClsToWrap": ["Layer"]})
    result = run(job)
    assert {finding.rule for finding in result.findings} == {
        "claim-not-mounted",
        "tokenizer-unusable",
        "wrap-class-unknown",
        "target-module-unknown",
        "data-file-missing",
        "data-record-invalid",
    }
    assert len(result.envelope().encode()) <= 4096
    assert result.message.startswith("6 errors; first: ")
