"""`finetune explain`: every word that the product prints has an answer, and an unknown one a suggestion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.cluster import CheckId
from finetune_cli.commands.explain import explain
from finetune_cli.corrections.foreign import answer, answer_without_value
from finetune_cli.corrections.table import rows
from finetune_cli.render.explanations import explained_text
from finetune_job.catalogue.book import ENTRIES
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.fields import all_fields
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Phase, Reason
from finetune_job.rules.book import RULES
from finetune_job.rules.cel.condition import TRANSITIONS


def run(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


def explained(word: str) -> str:
    """What is printed, with its lines joined."""
    answer = run(word)
    assert answer.exit_code == 0, answer.output
    return " ".join(answer.output.split())


def test_a_rule_is_explained_with_its_evidence():
    shown = explained("wrap-class-list-empty")
    for part in (
        "refuses the job",
        "spec.parallelism.fsdp.transformerLayerClsToWrap",
        "API server",
        "no error: one unit holds the whole model",
        ".venv/bin/pytest",
        "tests/pitfalls/test_wrapping.py",
        "peft/utils/other.py",
    ):
        assert part in shown
    unproven = next(rule for rule in RULES if rule.reproduction is None)
    assert "there is no reproduction" in explained(unproven.id)
    assert explained(" WRAP_CLASS_LIST_EMPTY") == shown


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("token-index-unknown", ("gate: preflight", "refuses the job", "test_rows_beyond_the_embedding_are_refused")),
        ("trained-token-unread", ("refuses some jobs, and warns of others",)),
        ("rehearsal-not-done", ("gate: rehearsal", "warns")),
        ("invalid-field", ("gate: schema", "not an object of this API")),
        ("frozen-after-start", ("refuses the change", "create a new job")),
        ("DeviceOutOfMemory", ("failure class", "code 44", "retry: no", "spec.training.microBatchSize")),
        ("preflight/UserModel", ("UserModel: failure class", "code 42")),
        ("nodelost", ("NodeLost: failure class", "NodeLost: reason", "retry: not counted")),
        ("44", ("exit code of a container", "DeviceOutOfMemory")),
        ("3", ("exit code of finetune", "A run failed, ")),
        (
            "spec.training.learningRate",
            (
                "spec.training.learningRate: field of FineTuneJob type: number in quotes",
                "default: unset",
                "Peak learning rate.",
                "device: the same on GPU and CPU",
                "steps-too-large",
            ),
        ),
        ("spec.training.globalBatchSize", ("type: integer default: 16 unit: sequences bounds: 1 to 1,000,000",)),
        ("SPEC.Data.Datasets[0].source", ("spec.data.datasets[].source: field", "default: none: required", "txt-without-text")),
        ("processespernode", ("spec.parallelism.processesPerNode", "GPU: the GPUs of a node", "CPU: ranks that share")),
        ("spec.checkpoint.everySeconds", ("unit: seconds",)),
        ("spec.training", ("type: object", "fields: epochs, maxSteps,")),
        ("spec.training.scheduler", ("one of Constant, Linear, Cosine, InverseSqrt, WarmupStableDecay",)),
        ("spec.method.lora.targetModules", ("list of string",)),
        ("spec.gpu.resourceName", ("field of FineTuneProfile",)),
        ("status.phase", ("field of FineTuneJob",)),
        ("Stalled", ("Stalled: failure class", "Stalled: condition", "code 53")),
        ("Stopping", ("Stopping: reason", "Stopping: phase of a job", "its pods are ending")),
        ("fetching", ("Fetching: phase of a job", "next is preflight")),
        ("Finishing", ("Finishing: phase of a job",)),
        ("Resized", ("Resized: outcome of an attempt", "another number of nodes")),
        ("kubernetes-version", ("check of finetune doctor", "a version that the chart supports")),
        ("Storage Class", ("storage-class: check of finetune doctor", "the cluster's default")),
        ("NETWORK_POLICIES", ("network-policies: check of finetune doctor", "both directions")),
        ("node-isolation", ("check of finetune doctor", "the kubelet of the node")),
        ("profile", ("profile: check of finetune doctor", "spec.profile: field of FineTuneJob")),
        ("WaitingInLine", ("reason of a condition or an event", "maxActiveJobs")),
        ("training.learningRate", ("spec.training.learningRate: field of FineTuneJob",)),
        ("lora.r", ("spec.method.lora.r: field of FineTuneJob",)),
        ("unusable", ("unusable: verdict of finetune validate", "It is not a FineTuneJob.")),
        ("accepted", ("accepted: verdict of finetune validate",)),
        ("QLoRA", ("QLoRA: value of spec.method.type",)),
        ("qlora", ("QLoRA: value of spec.method.type",)),
        ("AdamW", ("AdamW: value of spec.training.optimizer",)),
        ("Cosine", ("Cosine: value of spec.training.scheduler",)),
        ("Selective", ("Selective: value of spec.training.activationCheckpointing",)),
        ("varlen", ("varlen: value of spec.model.attention",)),
        ("Alpaca", ("Alpaca: value of spec.data.mapping.preset",)),
        ("bfloat16", ("value of spec.model.dtype", "spec.merge.dtype")),
        # Names of fields, of conditions and of rules may be values, too.
        ("LoRA", ("spec.method.lora: field of FineTuneJob", "LoRA: value of spec.method.type means: How the model is trained")),
        ("Completion", ("completion: field of FineTuneJob", "Completion: value of spec.data.lossOn")),
        ("Text", ("text: field of FineTuneJob", "Text: value of spec.data.format")),
        ("Keep", ("spec.checkpoint.keep: field of FineTuneJob", "Keep: value of spec.workspace.retain")),
        ("run", ("spec.run: field of FineTuneJob", "Run: value of spec.preflight.rehearsal")),
        ("Trained", ("Trained: condition", "Trained: value of spec.merge.base means:")),
        ("LOCAL_STATE_DICT", ("local-state-dict: ", "value of spec.parallelism.fsdp.stateDictType")),
        ("ChatML", ("ChatML: chat template", "A value of spec.data.chatTemplate: turns between <|im_start|>")),
        ("137", ("137: end of a container", "HostOutOfMemory if the kubelet says OOMKilled")),
        ("143", ("143: end of a container", "Preempted")),
        ("OOMKilled", ("OOMKilled: end of a container", "HostOutOfMemory")),
        ("learning_rate", ("spec.training.learningRate",)),
        ("gradient_accumulation_steps", ("gradient_accumulation_steps: setting of other tools", "globalBatchSize")),
    ],
)
def test_other_words_are_explained(word, parts):
    shown = explained(word)
    assert [part for part in parts if part not in shown] == []


SETTINGS = {
    "load_in_4bit": "For load_in_4bit: true, write spec.method.type: QLoRA, which packs the base in 4 bits. For load_in_4bit: "
    "false, remove it: only QLoRA and QDoRA pack the base.",
    "torch_compile": "For torch_compile: true, write spec.training.compile: true. For torch_compile: false, write "
    "spec.training.compile: false.",
    "use_gradient_checkpointing": "For use_gradient_checkpointing: true, write spec.training.activationCheckpointing: Full. For "
    "use_gradient_checkpointing: false, write spec.training.activationCheckpointing: None.",
    "fp16": "For fp16: true, write spec.training.precision: bf16, which needs no loss scaling; float16 is not offered. For fp16: "
    "false, remove it: float16 is never computed with.",
    "bf16": "For bf16: true, write spec.training.precision: bf16. For bf16: false, write spec.training.precision: fp32.",
    "gradient_accumulation_steps": "Write microBatchSize x ranks x this number in spec.training.globalBatchSize: accumulation "
    "follows from it.",
    "num_warmup_steps": 'Write the share of all steps in spec.training.warmupRatio, such as "0.03".',
    "report_to": "For report_to: wandb, write spec.training.trackers: [wandb]. For report_to: none, remove it: nothing is "
    "reported to a tracker unless spec.training.trackers names one.",
    "lr_scheduler": "For lr_scheduler: cosine, write spec.training.scheduler: Cosine. For lr_scheduler: linear, write "
    "spec.training.scheduler: Linear.",
    "lora_r": "Write spec.method.lora.r.",
    "logging_steps": "Remove it: every step is logged.",
}
"""Of other tools: a switch, a number, a word, and what is the same whatever it is."""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_another_tool_is_explained_without_a_value(name):
    meanings = json.loads(run(name, "-o", "json").output)["meanings"]
    assert [each["meaning"] for each in meanings if each["kind"] == "setting of other tools"] == [SETTINGS[name]]


PROBES = (True, False, 8, "word", ["a"])


def test_no_explanation_of_a_setting_takes_a_value_that_nobody_has_named():
    for name in {name for row in rows().values() for name in row.names}:
        text, fixes = answer_without_value(name), {answer(name, value, {}).fix for value in PROBES}
        assert text.endswith(".")
        by_value = f"For {name}: " in text or text in (SETTINGS["gradient_accumulation_steps"], SETTINGS["num_warmup_steps"])
        assert (len(fixes) > 1) <= by_value, (name, fixes)
        assert not {"None", "False", "True"} & set(text.replace("activationCheckpointing: None", "").split()), text


def test_every_word_that_the_product_prints_is_explained():
    words = [
        *(rule.id for rule in RULES),
        *(each.rule for each in TRANSITIONS),
        *(entry.id for entry in ENTRIES),
        *FailureClass,
        *(f"{role}/{failure}" for role in Role for failure in FailureClass),
        *map(str, EXIT_CODES.values()),
        *ConditionType,
        *Reason,
        *Phase,
        *AttemptOutcome,
        *CheckId,
        *("0", "1", "2", "3", "130"),
    ]
    words += sorted(fields_of_the_crds())
    assert len(words) > 500
    assert [word for word in words if word.rpartition("/")[2] not in explained_text(explain(word))] == []


def test_every_value_of_a_field_is_explained_as_one():
    values = {value: field.path for field in all_fields() for value in field.values if field.path.startswith("spec.")}
    assert len(values) > 100
    assert [value for value, path in values.items() if f"{value}: value of " not in explained_text(explain(value))] == []


def fields_of_the_crds() -> set[str]:
    """Paths of all fields, as the files that users install have them."""
    found: set[str] = set()
    for file in sorted((Path(__file__).parents[4] / "crds").glob("*.yaml")):
        schema = yaml.safe_load(file.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for root in ("spec", "status"):
            if root in schema["properties"]:
                found |= {root, *_paths(root, schema["properties"][root])}
    return found


def _paths(path: str, node: dict[str, Any]) -> Iterator[str]:
    if "items" in node:
        path, node = f"{path}[]", node["items"]
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from _paths(f"{path}.{name}", child)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("wrap-class-blank", "wrap-class-name-blank"),
        ("token-indx-unknown", "token-index-unknown"),
        ("DeviceOutofMemori", "DeviceOutOfMemory"),
        ("waiting in lines", "WaitingInLine"),
        ("spec.training.learninRate", "spec.training.learningRate"),
        ("spec.trainning.maxStep", "spec.training.maxSteps"),
        ("spec.learningRate", "spec.training.learningRate"),
    ],
)
def test_an_unknown_word_is_answered_with_what_is_like_it(word, meant):
    answer = run(word)
    assert answer.exit_code == 2
    assert f"unknown term: {word}; did you mean " in answer.output
    assert meant in answer.output


def test_a_word_that_is_like_nothing_leads_to_the_list():
    answer = run("xyzzy")
    assert answer.exit_code == 2
    assert answer.output == "unknown term: xyzzy; `finetune explain` lists all findings\n"


@pytest.mark.parametrize(
    ("word", "kind", "expected"),
    [
        ("wrap-class-list-empty", "rule", {"severity": "error", "topic": "wrapping", "needsHuman": False}),
        ("token-index-unknown", "finding", {"gates": ["preflight"]}),
        ("frozen-after-start", "refused change", {"gates": ["API server"]}),
        ("DeviceOutOfMemory", "failure class", {"exitCode": 44, "retry": "no"}),
        ("130", "exit code of finetune", {"word": "130"}),
        ("spec.checkpoint.keep", "field", {"default": "2", "bounds": "2 to 1,000", "type": "integer", "required": False}),
    ],
)
def test_the_same_is_there_as_data(word, kind, expected):
    document = json.loads(run(word, "-o", "json").output)
    meaning = next(each for each in document["meanings"] if each["kind"] == kind)
    assert {name: meaning[name] for name in expected} == expected
    assert document["word"] == word


def test_the_list_is_there_as_data():
    listed = json.loads(run("-o", "json").output)["findings"]
    assert {each["id"] for each in listed} == {*(rule.id for rule in RULES), *(entry.id for entry in ENTRIES)}


def test_all_findings_are_listed_by_topic():
    listed = run().output
    for identifier in (*(rule.id for rule in RULES), *(entry.id for entry in ENTRIES)):
        assert f" {identifier} " in listed
    assert listed.startswith("wrapping\n  error   wrap-class-list-empty")
    assert "\nbase model: files\n  error   model-directory-missing" in listed
