"""A plan that another release froze: what the operator reads of it, what a container refuses, and what missing fields mean."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_job.plan.digest import canonical_json, learning_sha256, text_sha256
from finetune_job.plan.launch_plan import read_launch_plan
from finetune_job.plan.run_plan import RunPlan
from tests.support.builders import a_job


def document() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(canonical_json(a_job().plan()))
    return content


def test_the_operator_ignores_what_a_newer_release_wrote_at_any_depth() -> None:
    newer = document()
    newer["novelty"] = {"a": 1}
    newer["placement"]["novelty"] = [1]
    newer["placement"]["resources"]["train"]["novelty"] = "x"
    newer["workspace"]["novelty"] = "x"
    newer["method"] |= {"type": "Unheard", "lora": {"novelty": 1}}
    newer["training"]["optimizer"] = "Unheard"
    newer["parallelism"]["fsdp"]["version"] = "none"
    read = read_launch_plan(json.dumps(newer))
    assert read.parallelism.nodes == 1
    assert read.workspace.claim == "scratch"
    assert read.has_adapter
    assert read.placement is not None
    assert read.placement.resources.train.cpu == "8"


@pytest.mark.parametrize("path", [(), ("method",), ("training",), ("parallelism", "fsdp"), ("workspace",)])
def test_a_container_refuses_fields_that_it_does_not_know(path: tuple[str, ...]) -> None:
    newer = here = document()
    for name in path:
        here = here[name]
    here["novelty"] = 1
    with pytest.raises(ValidationError, match="novelty"):
        RunPlan.model_validate_json(json.dumps(newer))


def test_a_container_takes_what_it_does_not_know_of_the_placement() -> None:
    newer = document()
    newer["placement"]["novelty"] = 1
    assert RunPlan.model_validate_json(json.dumps(newer)) == a_job().plan()


def test_a_plan_of_another_version_is_not_read() -> None:
    with pytest.raises(ValidationError, match="version"):
        read_launch_plan(json.dumps(document() | {"version": 2}))


def test_what_the_first_release_lacked_has_the_meaning_that_it_had_there() -> None:
    old = document()
    for name in ("fetch", "publish", "keeps_adapter", "rehearses"):
        del old[name]
    old["data"] = {key: value for key, value in old["data"].items() if key != "chat_template"} | {
        "train": {"claim": "data", "path": "train.jsonl"},
        "validation": {"claim": "data", "path": "held-out.jsonl"},
    }
    del old["model"]["name"], old["model"]["revision"], old["method"]["adapter"], old["merge"]["base"]
    for name in ("target_parameters", "exclude_modules", "layers_to_transform", "init_lora_weights", "trainable_token_indices"):
        del old["method"]["lora"][name]
    del old["method"]["lora"]["lora_plus_ratio"]
    for name in ("optimizer", "adam_betas", "adam_epsilon", "momentum", "min_learning_rate_ratio", "decay_ratio", "compile"):
        del old["training"][name]
    del old["training"]["step_timeout_seconds"], old["training"]["trackers"]
    del old["checkpoint"]["every_seconds"], old["checkpoint"]["asynchronous"]
    del old["evaluation"]["early_stopping"], old["evaluation"]["load_best_model_at_end"]
    del old["placement"]["gpu_memory"]
    old["placement"]["versions"] = {"torch": "2.10.0"}
    plan = RunPlan.model_validate_json(json.dumps(old))
    assert [(one.location.path, one.source, one.field, one.weight) for one in plan.data.train] == [
        ("train.jsonl", "pvc://data/train.jsonl", "spec.data.source", 1.0)
    ]
    assert plan.data.validation is not None
    assert plan.data.validation.field == "spec.data.validation.source"
    assert plan.model.name == "pvc://models/base"
    assert (plan.fetch, plan.publish, plan.keeps_adapter, plan.rehearses) == (None, None, True, False)
    assert plan.merge.base == "Original"
    assert plan.method.lora is not None
    assert (plan.method.lora.init_lora_weights, plan.method.lora.target_parameters) == ("ZeroB", ())
    assert (plan.training.optimizer, plan.training.adam_betas, plan.training.adam_epsilon) == ("AdamW", (0.9, 0.999), 1e-8)
    assert (plan.training.compile, plan.checkpoint.asynchronous, plan.evaluation.load_best_model_at_end) == (False, False, False)


def test_what_is_learnt_keeps_its_digest_in_releases_that_know_more_of_lora() -> None:
    """By hand, as the release before token rows and expert parameters computed it."""
    old = document()
    for name in ("target_parameters", "trainable_token_indices", "separate_token_rows", "fused_forward"):
        del old["method"]["lora"][name]
    del old["model"]["added_tokens"]
    del old["training"]["start_from"]
    learnt = {name: old[name] for name in ("version", "job", "model", "data", "method", "training", "evaluation")}
    how = ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "compile", "step_timeout_seconds")
    later = ("trackers", "reduction", "deterministic")
    learnt["training"] = {name: value for name, value in learnt["training"].items() if name not in (*how, *later)}
    expected = text_sha256(json.dumps(learnt, sort_keys=True, separators=(",", ":")))
    assert learning_sha256(RunPlan.model_validate_json(json.dumps(old))) == expected
    assert learning_sha256(RunPlan.model_validate_json(json.dumps(document()))) == learning_sha256(a_job().plan()) != expected
    gone = {**old, "training": {**old["training"], "fp8": True}}
    assert learning_sha256(RunPlan.model_validate_json(json.dumps(gone))) == expected
    start = {"claim": "workspace", "path": "tune/checkpoints/step-0000000001"}
    begun = {**old, "training": {**old["training"], "start_from": start}}
    assert learning_sha256(RunPlan.model_validate_json(json.dumps(begun))) != expected
