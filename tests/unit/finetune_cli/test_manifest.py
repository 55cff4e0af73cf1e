"""A document that does not fit the schema: one finding for each wrong field, with its fix."""

from __future__ import annotations

import pytest
import yaml

from finetune_cli.checks.validate import DocumentOutcome, validate
from finetune_cli.exit_codes import ExitCode
from tests.unit.finetune_cli.manifests import ACCEPTED, edited, findings


@pytest.mark.parametrize(
    ("path", "value", "field", "reason", "fix"),
    [
        ("spec.evaluaton", {}, "spec.evaluaton", "there is no such field", "write evaluation"),
        ("spec.trainig", {}, "spec.trainig", "there is no such field", "remove spec.trainig; training is written already"),
        ("spec.checkpoint.every_steps", 5, "spec.checkpoint.every_steps", "there is no such field", "write everySteps"),
        (
            "spec.model.zzz",
            1,
            "spec.model.zzz",
            "there is no such field",
            "remove spec.model.zzz; allowed here: addedTokens, allowRemoteCode, attention",
        ),
        ("spec.training.maxSteps", "ten", "spec.training.maxSteps", "should be a valid integer", "write a whole number"),
        ("spec.training.maxSteps", "12", "spec.training.maxSteps", "should be a valid integer", "write 12, a whole number"),
        ("spec.training.maxSteps", True, "spec.training.maxSteps", "should be a valid integer", "write a whole number"),
        (
            "spec.training.maxSteps",
            0,
            "spec.training.maxSteps",
            "is no number of steps",
            "leave it out: 0 and less mean that no steps are set; set spec.training.epochs",
        ),
        (
            "spec.checkpoint.keep",
            1,
            "spec.checkpoint.keep",
            "is below 2, the least that is allowed",
            "write 2 (Complete checkpoints",
        ),
        ("spec.training.maxSteps", float("nan"), "spec.training.maxSteps", "is not a finite number", "write a finite number"),
        ("spec.training.maxSteps", float("inf"), "spec.training.maxSteps", "is not a finite number", "write a finite number"),
        ("spec.training.learningRate", float("-inf"), "spec.training.learningRate", "is not a finite number", "finite"),
        ("spec.training.learningRate", "nan", "spec.training.learningRate", "'nan' is not finite", "write a finite number"),
        ("spec.training.learningRate", "Infinity", "spec.training.learningRate", "is not finite", "write a finite number"),
        ("spec.training.learningRate", 0.001, "spec.training.learningRate", "must be a string", 'write "0.001" in quotes'),
        ("spec.training.learningRate", "fast", "spec.training.learningRate", "is not a number", "write it as in"),
        ("spec.training.learningRate", "-1", "spec.training.learningRate", "is below 0", "or remove spec.training.learningRate"),
        ("spec.training.learningRate", -0.5, "spec.training.learningRate", "-0.5 is below 0", 'such as "0.05"'),
        ("spec.training.learningRate", True, "spec.training.learningRate", "is a boolean", "write a number as a string"),
        *(
            ("spec.training.learningRate", text, "spec.training.learningRate", "is not written as numbers are here", "as in")
            for text in ("+1", ".1", "1.", " 1e-4", "1.0e-100", "1_0", "1e-4\n", "\u0661")
        ),
        ("spec.training.maxSteps", 10**20, "spec.training.maxSteps", "is larger than any number", "write a smaller number"),
        ("spec.method.type", "lora", "spec.method.type", "is not one of 'LoRA'", "write LoRA"),
        ("spec.model.dtype", "bf16", "spec.model.dtype", "is not one of 'bfloat16'", "write bfloat16"),
        ("spec.training.precision", "tf32", "spec.training.precision", "is not one of 'bf16'", "write"),
        ("spec.method.lora.initLoraWeights", "gausian", "spec.method.lora.initLoraWeights", "is not one of", "write gaussian"),
        (
            "spec.method.lora.initLoraWeights",
            "loftp",
            "spec.method.lora.initLoraWeights",
            "is not one of",
            "olora; loftq is not supported",
        ),
        *(
            (f"spec.parallelism.fsdp.{field}", word, f"spec.parallelism.fsdp.{field}", "is not one of", meant)
            for field, word, meant in (
                # What all words end with says nothing about which of them is meant.
                ("autoWrapPolicy", "AUTO_WRAP", "write 'TRANSFORMER_BASED_WRAP', 'SIZE_BASED_WRAP' or 'NO_WRAP'"),
                ("autoWrapPolicy", "SIZE_WRAP", "write 'TRANSFORMER_BASED_WRAP', 'SIZE_BASED_WRAP' or 'NO_WRAP'"),
                ("autoWrapPolicy", "TRANSFORMER_WRAP", "write TRANSFORMER_BASED_WRAP"),
                ("autoWrapPolicy", "size_based", "write SIZE_BASED_WRAP"),
                ("autoWrapPolicy", "no_wrap", "write NO_WRAP"),
                ("stateDictType", "STATE_DICT", "write 'FULL_STATE_DICT', 'SHARDED_STATE_DICT' or 'LOCAL_STATE_DICT'"),
            )
        ),
        ("spec.method.type", "PromptTunning", "spec.method.type", "is not one of 'LoRA'", "PromptTuning is not supported"),
        ("spec.merge.base", "Packed", "spec.merge.base", "is not one of 'Original'", "'Original'"),
        ("spec.data.packing", "yes", "spec.data.packing", "should be a valid boolean", "write true, without quotes"),
        ("spec.method.lora.targetModules", "q_proj", "spec.method.lora.targetModules", "is a text, not a list", "write [q_proj]"),
        ("spec.method.lora.targetModules", "q, v", "spec.method.lora.targetModules", "is a text, not a list", "write [q, v]"),
        ("spec.method.lora.targetModules", {"q": 1}, "spec.method.lora.targetModules", "should be a valid array", "write a list"),
        ("spec.method.lora.targetModules", ["q", 3], "spec.method.lora.targetModules[1]", "should be a valid string", "quotes"),
        ("spec.model", "pvc://models/base", "spec.model", "should be an object", "write a mapping"),
        (
            "spec.model.source",
            "file:///srv/model",
            "spec.model.source",
            "pvc://<claim>/<path> is a path",
            "write pvc://srv/model, and",
        ),
        ("spec.model.source", "pvc://models/../x", "spec.model.source", "leaves its root", "write a path without"),
        ("metadata.name", "", "metadata.name", "is empty: it may have lower-case letters", "write another value, such as tuned"),
        (
            "spec.model.hubName",
            "llama",
            "spec.model.hubName",
            "is not the name of a repository, which has two parts: <org>/<name>",
            "write <org>/<name>, or remove spec.model.hubName",
        ),
        (
            "spec.method.type",
            "KTO",
            "spec.method.type",
            "trains on preferences or rewards, which this product does not do",
            "write LoRA",
        ),
        (
            "spec.method.type",
            "x" * 9,
            "spec.method.type",
            "is not one of 'LoRA', 'QLoRA', 'DoRA', 'QDoRA', 'Full' and 10 others",
            "'Full' or one of 10 others",
        ),
        (
            "spec.data.validation",
            {"source": ["pvc://data/a", "pvc://data/b"]},
            "spec.data.validation.source",
            "should be a valid string",
            "write one text, not a list",
        ),
        ("metadata.name", "Not_A_Name", "metadata.name", "lower-case letters, digits and dashes", "write not-a-name"),
        ("apiVersion", "finetune.dev/v1", "apiVersion", "is not one of", "finetune.dev/v1alpha1"),
    ],
)
def test_one_clear_finding_for_each_wrong_field(path, value, field, reason, fix):
    found = findings(edited(path, value))
    assert set(found) == {field}
    assert found[field][0]
    assert reason in found[field][1]
    assert fix in found[field][2]
    assert validate(edited(path, value)).exit_code is ExitCode.UNUSABLE


def test_a_missing_field_is_named_with_its_meaning():
    document = yaml.safe_load(ACCEPTED)
    del document["spec"]["workspace"], document["spec"]["model"]["source"]
    found = findings(yaml.safe_dump(document))
    assert found["spec.workspace"][:2] == ("unset", "is required")
    assert "pvc://<claim>/<path>" in found["spec.model.source"][2]


def test_a_generated_name_is_a_name():
    """`kubectl create` takes such manifests, and the API server makes the name before it judges."""
    report = validate(ACCEPTED.replace("name: tuned", "generateName: tune-"))
    assert [(verdict.outcome, verdict.name) for verdict in report.verdicts] == [(DocumentOutcome.ACCEPTED, "tune-xxxxx")]
    long = validate(ACCEPTED.replace("name: tuned", f"generateName: {'a' * 100}-"))
    assert [len(verdict.name) for verdict in long.verdicts] == [63]
    assert "metadata.name" in findings(ACCEPTED.replace("name: tuned", "generateName: Tune-"))


def test_values_are_shown_as_a_manifest_writes_them():
    written = {"trainableTokenIndices": [7, 7], "rankPattern": {"(q": 4}}
    found = findings(edited("spec.method.lora", written))
    assert found["spec.method.lora.trainableTokenIndices"][0] == "[7, 7]"
    tokens = edited("spec.method", {"type": "LoHa", "settings": {"rankPattern": {"q": "4"}}})
    assert findings(tokens)["spec.method.settings"][0] == 'rankPattern: {q: "4"}'
    (finding,) = validate(edited("spec.model.source", "x" * 70_000)).verdicts[0].findings
    assert len(finding.value) == 100


def test_unknown_metadata_is_named_as_kubectl_would():
    typo = ACCEPTED.replace("metadata:\n", "metadata:\n  lables: {a: b}\n")
    assert findings(typo) == {"metadata.lables": ("a mapping", "there is no such field", "write labels")}
    assert findings(ACCEPTED.replace("metadata:\n", "metadata:\n  labels: {a: b}\n  annotations: {c: d}\n")) == {}
