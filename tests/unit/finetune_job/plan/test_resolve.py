"""Spec -> RunPlan: every value resolved, every choice recorded, equal plans equal bytes."""

from finetune_job.api.base import ClaimPath
from finetune_job.api.enumerations import Dtype
from finetune_job.api.job import parse_job
from finetune_job.api.profile import FineTuneProfileSpec, PublishSettings
from finetune_job.plan.digest import canonical_json, plan_sha256, text_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from tests.unit.finetune_job.api.test_job import MINIMAL, changed

IDENTITY = JobIdentity(namespace="team", name="run", uid="0123456789ab")


def plan(path: str = "spec.training.epochs", value: object = 1) -> RunPlan:
    return resolve(IDENTITY, parse_job(changed(path, value)).spec, None)


def test_what_is_left_open_is_chosen_and_recorded() -> None:
    resolved = plan()
    chosen = {choice.field: choice.value for choice in resolved.choices}
    assert chosen["spec.method.lora.loraAlpha"] == 32
    assert resolved.method.lora is not None
    assert resolved.method.lora.lora_alpha == 32
    assert chosen["spec.training.learningRate"] == "2e-4"
    assert resolved.training.learning_rate == 2e-4
    assert all(choice.reason for choice in resolved.choices)


def test_what_is_set_is_kept_and_not_called_a_choice() -> None:
    resolved = plan("spec.training.learningRate", "0.003")
    assert resolved.training.learning_rate == 0.003
    assert "spec.training.learningRate" not in {choice.field for choice in resolved.choices}


def test_results_on_a_claim_are_written_there_and_published_by_nobody() -> None:
    resolved = plan()
    assert (resolved.output, resolved.publish, resolved.keeps_adapter) == (ClaimPath(claim="out", path="run"), None, True)


def test_results_for_elsewhere_wait_on_the_workspace() -> None:
    profile = FineTuneProfileSpec(trainer_image="trainer", publish=PublishSettings(plain_http_registries=["host:5000"]))
    output = {"destination": "oci://host:5000/a/b", "secretRef": {"name": "login"}, "adapter": False}
    resolved = resolve(IDENTITY, parse_job(changed("spec.output", output)).spec, profile)
    assert resolved.output == ClaimPath(claim="work", path="run-01234567/results")
    assert not resolved.keeps_adapter
    assert resolved.publish is not None
    assert (resolved.publish.secret, resolved.publish.plain_http_registries) == ("login", ("host:5000",))
    assert resolved.publish.destination == "oci://host:5000/a/b:latest"
    assert "spec.output.destination" in {choice.field for choice in resolved.choices}
    written = plan("spec.output.destination", "oci://host:5000/a/b:v1")
    assert written.publish is not None
    assert written.publish.destination == "oci://host:5000/a/b:v1"
    assert "spec.output.destination" not in {choice.field for choice in written.choices}


def test_the_profile_is_frozen_into_the_plan() -> None:
    profile = FineTuneProfileSpec(trainer_image="registry.test/trainer@sha256:0", run_as_user=1000)
    placement = resolve(IDENTITY, parse_job(MINIMAL).spec, profile).placement
    assert placement is not None
    assert (placement.trainer_image, placement.run_as_user, placement.profile) == (
        "registry.test/trainer@sha256:0",
        1000,
        "default",
    )


def test_the_workspace_is_a_directory_of_its_own() -> None:
    assert plan().workspace.claim == "work"
    assert plan().workspace.path == "run-01234567"
    template = {"volumeClaimTemplate": {"storage": "1Gi"}}
    assert plan("spec.workspace", template).workspace.claim == "run-workspace"


def test_equal_plans_give_equal_bytes_and_read_back() -> None:
    text = canonical_json(plan())
    assert RunPlan.model_validate_json(text) == plan()
    assert plan_sha256(plan()) == text_sha256(text)
    assert plan_sha256(plan("spec.model.dtype", Dtype.FLOAT32)) != plan_sha256(plan())
