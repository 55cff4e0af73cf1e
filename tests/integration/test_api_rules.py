"""What the API server itself refuses, and what users may and may not do."""

import pytest

from finetune_job.names import Role
from tests.integration.conftest import Installed, OperatorFactory
from tests.integration.kube import Kube, RefusedError
from tests.integration.workload import Workload

pytestmark = pytest.mark.integration


def as_user(workload: Workload, role: str) -> Kube:
    """A user who has one of the built-in roles in the namespace."""
    name = f"{role}-user"
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}],
    }
    workload.kube.create("RoleBinding", workload.namespace, binding)
    user = workload.kube.acting_as(name)

    workload.wait(lambda: user.may_list("FineTuneJob", workload.namespace), f"the built-in role {role} to hold the chart's rules")
    return user


def test_spec_is_frozen_once_the_job_has_started(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply(
        method={"type": "LoHa", "settings": {"r": 4, "targetModules": ["q_proj"]}},
        merge={"enabled": False},
        output={"destination": "oci://host.test/a:v1", "secretRef": {"name": "login"}},
        run={"priorityClassName": "low"},
    )
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"training": {"globalBatchSize": 8}}})
    operator()
    workload.wait_for_pods(Role.PREFLIGHT)
    for field, change in (
        ("training", {"training": {"globalBatchSize": 16}}),
        ("profile", {"profile": "other"}),
        # The settings of a method have no schema.
        ("method", {"method": {"settings": {"r": 8}}}),
        ("method", {"method": {"settings": {"alpha": 16}}}),
        ("method", {"method": {"settings": {"targetModules": ["v_proj"]}}}),
        ("output", {"output": {"destination": "oci://host.test/a:v2"}}),
        ("output", {"output": {"secretRef": {"name": "other"}}}),
        ("output", {"output": {"adapter": False}}),
        ("output", {"output": {"private": False}}),
        # Queue and priority belong to `run`, whose other fields can change.
        ("run.queueName", {"run": {"queueName": "gpus"}}),
        ("run.priorityClassName", {"run": {"priorityClassName": "high"}}),
        ("run.priorityClassName", {"run": {"priorityClassName": None}}),
    ):
        frozen = rf"frozen-after-start: spec\.{field} cannot change after the job has started"
        with pytest.raises(RefusedError, match=frozen) as refusal:
            workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": change})
        assert refusal.value.code == 422
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"maxRestarts": 7}}})


def test_a_cancelled_job_cannot_be_revived(workload: Workload) -> None:
    workload.apply(run={"cancel": True})
    with pytest.raises(RefusedError, match=r"cancel-is-final: a cancelled job cannot be revived; create a new job") as refusal:
        workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"cancel": False}}})
    assert refusal.value.code == 422
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"retry": 1}}})
    assert workload.job()["spec"]["run"]["cancel"] is True


def test_unknown_and_malformed_fields_are_refused_at_the_door(workload: Workload) -> None:
    with pytest.raises(RefusedError, match="unknown field"):
        workload.apply("unknown", surprise=1)
    with pytest.raises(RefusedError, match="exactly one of epochs and maxSteps"):
        workload.apply("both", training={"epochs": 1, "maxSteps": 4})
    with pytest.raises(RefusedError, match=r"spec\.training\.globalBatchSize"):
        workload.apply("small", training={"maxSteps": 4, "globalBatchSize": 0})
    with pytest.raises(RefusedError, match=r"spec\.model\.source.*should match"):
        workload.apply("path", model={"source": "models/base"})
    with pytest.raises(RefusedError, match=r"spec\.merge\.base: Unsupported value"):
        workload.apply("base", merge={"base": "Packed"})
    with pytest.raises(RefusedError, match=r"spec\.training\.learningRate.*should match"):
        workload.apply("number", training={"maxSteps": 4, "learningRate": "nan"})


def test_a_destination_has_a_known_form(workload: Workload) -> None:
    for number, good in enumerate(
        (
            "pvc://results/a",
            "hf://org/model",
            "s3://bucket/a/b",
            "oci://host.test:5000/a/b-c:v1.2",
            "oci://host/a",
            "oci://10.0.0.1:5000/a",
        )
    ):
        workload.apply(f"good-{number}", output={"destination": good})
    for bad in ("hf://org/model/path", "oci://host/Upper", "oci://host", "oci://host/a:", "oci://host/a@sha256:0", "file:///x"):
        with pytest.raises(RefusedError, match=r"spec\.output\.destination.*should match"):
            workload.apply("bad", output={"destination": bad})


def test_a_field_that_was_pruned_shows_in_the_effective_settings(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply_leniently(training={"maxSteps": 4, "learningrate": "5e-5"})
    operator()
    plan = workload.wait(lambda: workload.status().get("plan"), "the plan in status")
    assert "learningrate" not in workload.job()["spec"]["training"]
    assert {"field": "spec.training.learningRate", "value": '"2e-4"', "reason": "usual for this method"} in plan["choices"]


def test_editor_manages_jobs_but_not_their_status(workload: Workload) -> None:
    editor = as_user(workload, "edit")
    Workload(editor, workload.namespace).apply()
    editor.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"suspend": True}}})
    with pytest.raises(RefusedError) as refusal:
        editor.patch("FineTuneJob", workload.namespace, "tune", {"status": {"phase": "Succeeded"}}, "status")
    assert refusal.value.code == 403
    editor.delete("FineTuneJob", workload.namespace, "tune")


def test_viewer_only_looks(workload: Workload) -> None:
    workload.apply()
    viewer = as_user(workload, "view")
    assert viewer.get("FineTuneJob", workload.namespace, "tune") is not None
    with pytest.raises(RefusedError) as refusal:
        viewer.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"cancel": True}}})
    assert refusal.value.code == 403


def test_explain_teaches_the_fields(installed: Installed) -> None:
    text = installed.cluster.kubectl("explain", "finetunejob.spec.training.globalBatchSize")
    assert "globalBatchSize" in text
    assert "DESCRIPTION" in text
