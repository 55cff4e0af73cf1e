"""The gang's Job and Service: what its pods are told, and the names by which they find each other."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from finetune_job.names import TRAIN_GRACE_PERIOD_SECONDS, Role, master_address
from finetune_operator.children.cpu_jobs import merge_job, preflight_job
from finetune_operator.children.train_job import gang_service, train_job
from tests.support.builders import a_job
from tests.unit.finetune_operator.children.building import BUILDERS, OWNER, pod_spec, run_of


def test_a_gang_lives_and_dies_as_one() -> None:
    spec = train_job(run_of(a_job().nodes(4)), 2)["spec"]
    template = spec.pop("template")
    assert spec == {
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
    }
    assert template["spec"]["restartPolicy"] == "Never"
    assert template["spec"]["terminationGracePeriodSeconds"] == TRAIN_GRACE_PERIOD_SECONDS


def test_the_arguments_of_a_training_pod() -> None:
    run = run_of(a_job().nodes(2))
    pod = pod_spec(train_job(run, 3))
    container = pod["containers"][0]
    assert container["args"] == [
        *("train", "--plan", "/plan/plan.json", "--plan-sha256", run.plan_sha256, "--attempt", "3"),
        *("--node-rank", "$(JOB_COMPLETION_INDEX)"),
        *("--master-address", master_address("tune", "team", 3, 2), "--master-port", "29400"),
    ]
    declared = {variable["name"]: variable for variable in container["env"]}
    for name in re.findall(r"\$\((\w+)\)", " ".join(container["args"])):
        assert name in declared, "an undeclared variable is not expanded"
    field = declared["JOB_COMPLETION_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_a_gang_of_one_pod_may_run_its_next_attempt_there() -> None:
    pod = pod_spec(train_job(run_of(a_job()), 3))
    container = pod["containers"][0]
    # Collective, Internal and Stalled: processes ended, and node, devices and volumes are as good as before.
    rule = {"action": "Restart", "exitCodes": {"operator": "In", "values": [47, 52, 53]}}
    assert (container["restartPolicy"], container["restartPolicyRules"]) == ("Never", [rule])
    assert container["args"][-2:] == ["--attempt-file", "/attempt/number"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "attempt"]
    item = {"path": "number", "fieldRef": {"fieldPath": "metadata.labels['finetune.dev/attempt']"}}
    assert volume["downwardAPI"] == {"items": [item]}
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "attempt"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/attempt", True)


def test_a_larger_gang_and_a_plan_of_before_end_with_their_pods() -> None:
    old = run_of(a_job())
    old = replace(old, placement=old.placement.model_copy(update={"restart_in_pod": False}))
    elastic = run_of(a_job().nodes(3).spec("training.reduction", "Ordered").spec("parallelism.elastic", {"minNodes": 1}))
    for job in (
        train_job(old, 0),
        train_job(run_of(a_job().nodes(2)), 0),
        train_job(elastic, 0, 1),
        merge_job(run_of(a_job()), 0),
    ):
        container = pod_spec(job)["containers"][0]
        assert not {"restartPolicy", "restartPolicyRules"} & set(container)
        assert "--attempt-file" not in container["args"]
        assert "attempt" not in [one["name"] for one in pod_spec(job)["volumes"]]


@pytest.mark.parametrize("name", ["tune", "a" * 63, "with.dots", "a-" * 30 + "b"])
@pytest.mark.parametrize("nodes", [1, 12])
def test_every_pod_of_a_gang_has_the_name_that_the_others_look_up(name: str, nodes: int) -> None:
    run = run_of(a_job().named(name).nodes(nodes))
    job, service = train_job(run, 0), gang_service(run.owner)
    assert pod_spec(job)["subdomain"] == service["metadata"]["name"]
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}.team.svc"
    arguments = pod_spec(job)["containers"][0]["args"]
    assert arguments[arguments.index("--master-address") + 1] == host
    assert all(len(label) <= 63 for label in f"{job['metadata']['name']}-{nodes - 1}".split("."))


def test_an_attempt_of_an_elastic_gang_is_told_its_nodes_and_has_the_names_of_the_largest() -> None:
    run = run_of(a_job().named("a" * 60).nodes(12).spec("training.reduction", "Ordered").spec("parallelism.elastic", {}))
    job, largest = train_job(run, 0, 3), train_job(run, 0)
    arguments, all_of_them = (pod_spec(one)["containers"][0]["args"] for one in (job, largest))
    assert arguments[-2:] == ["--nodes", "3"]
    assert (all_of_them[-2:], all_of_them[:-2]) == (["--nodes", "12"], arguments[:-2])
    assert job["metadata"]["name"] == largest["metadata"]["name"]


def test_the_service_finds_the_training_pods_before_they_are_ready() -> None:
    service = gang_service(OWNER)["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    for role in Role:
        labels = BUILDERS[role](run_of(a_job()), 0)["spec"]["template"]["metadata"]["labels"]
        assert (service["selector"].items() <= labels.items()) is (role is Role.TRAIN)


def test_only_training_pods_are_bound_to_the_profiles_nodes() -> None:
    run = run_of(a_job().with_profile(nodeSelector={"gpu": "h100"}))
    assert pod_spec(train_job(run, 0))["nodeSelector"] == {"gpu": "h100"}
    assert "nodeSelector" not in pod_spec(preflight_job(run, 0))
    assert "nodeSelector" not in pod_spec(merge_job(run, 0))
