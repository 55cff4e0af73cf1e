"""The gang's Job and Service: what its pods are told, and the names by which they find each other."""

import itertools
import re

import pytest

from finetune_job.names import TRAIN_GRACE_PERIOD_SECONDS, Role, master_address
from finetune_operator.children.cpu_jobs import cpu_job
from finetune_operator.children.train_job import gang_service, train_job
from tests.support.builders import a_job
from tests.unit.finetune_operator.children.building import OWNER, job_of, pod_spec, run_of


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


def test_only_a_gang_of_one_pod_may_start_its_ranks_again_and_no_more_often_than_the_job_may() -> None:
    elastic = run_of(a_job().nodes(3).spec("training.reduction", "Ordered").spec("parallelism.elastic", {"minNodes": 1}))
    assert run_of(a_job()).placement.restarts_in_pod == 2
    for job, number in (
        (train_job(run_of(a_job()), 3, restarts=2), ["2"]),
        (train_job(elastic, 0, 1, restarts=1), ["1"]),
        (train_job(run_of(a_job()), 3, restarts=0), []),
        (train_job(run_of(a_job().nodes(2)), 0, restarts=2), []),
        (train_job(elastic, 0, 2, restarts=2), []),
    ):
        arguments = pod_spec(job)["containers"][0]["args"]
        assert [after for name, after in itertools.pairwise(arguments) if name == "--restarts"] == number


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


def test_an_attempt_of_an_elastic_gang_is_given_its_nodes_and_has_the_names_of_the_largest() -> None:
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
        labels = job_of(role, run_of(a_job()))["spec"]["template"]["metadata"]["labels"]
        assert (service["selector"].items() <= labels.items()) is (role is Role.TRAIN)


def test_only_training_pods_are_bound_to_the_profiles_nodes() -> None:
    run = run_of(a_job().with_profile(nodeSelector={"gpu": "h100"}))
    assert pod_spec(train_job(run, 0))["nodeSelector"] == {"gpu": "h100"}
    assert "nodeSelector" not in pod_spec(cpu_job(run, Role.PREFLIGHT, 0))
    assert "nodeSelector" not in pod_spec(cpu_job(run, Role.MERGE, 0))
