"""What is read of a cluster, and how it is told what cannot be read. The server's answers are a real API server's."""

import json
from typing import Any

import pytest

from finetune_cli.cluster.client import ClusterClient, RequestError
from finetune_cli.cluster.errors import ClusterError, Right, cluster_error, right_for
from finetune_cli.cluster.objects import Cluster, Unseen, unless_refused
from tests.support.cases import table
from tests.unit.finetune_cli.cluster.test_client import ANSWERS, client
from tests.unit.finetune_cli.jobs import objects

__all__ = ["client"]
JOBS = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs"
LISTED = f"{JOBS}?limit=500"


@pytest.fixture
def cluster(client: ClusterClient) -> Cluster:
    return Cluster(namespace="team")


def answer(path: str, content: object, status: int = 200) -> None:
    ANSWERS[path] = (status, json.dumps(content))


def failure(code: int, reason: str, message: str, **details: str) -> tuple[int, str]:
    return code, json.dumps({"kind": "Status", "code": code, "reason": reason, "message": message, "details": details})


def test_a_refusal_by_a_policy_is_told_in_its_words() -> None:
    policy = "p" * 253
    said = f"x is forbidden: ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: "
    message = f"the API server answered 403 to {JOBS}: {said}spec.workspace.claimName: you may not"
    found = cluster_error(RequestError(message, 403), "POST", JOBS, "https://here")
    assert (str(found), found.status) == ("spec.workspace.claimName: you may not", 403)
    assert "you may not create finetunejobs" in str(
        cluster_error(RequestError("x is forbidden", 403), "POST", JOBS, "https://here")
    )


def test_jobs_are_read_page_by_page_and_sorted(cluster: Cluster) -> None:
    answer(LISTED, {"items": [objects.RUNNING, 3], "metadata": {"continue": "more"}})
    answer(f"{LISTED}&continue=more", {"items": [objects.FAILED]})
    assert [job.name for job in cluster.jobs()] == ["failed", "running"]
    answer("/apis/finetune.dev/v1alpha1/finetunejobs?labelSelector=a%3Db&limit=500", {"items": [objects.NEW]})
    assert [job.name for job in cluster.jobs(everywhere=True, selector="a=b")] == ["new"]


def test_the_namespace_of_the_kubeconfig_is_the_default(client: ClusterClient) -> None:
    assert (Cluster().namespace, Cluster(namespace="other").namespace) == ("default", "other")


@pytest.mark.parametrize(
    ("names", "hint"), table(__file__, "test_a_job_that_is_not_there_is_said_with_the_names_it_might_have_meant")
)
def test_a_job_that_is_not_there_is_said_with_the_names_it_might_have_meant(
    cluster: Cluster, names: list[str] | None, hint: str
) -> None:
    ANSWERS[f"{JOBS}/running"] = failure(404, "NotFound", '"running" not found', name="running", kind="finetunejobs")
    if names is None:
        ANSWERS[LISTED] = failure(403, "Forbidden", "no")
    else:
        answer(LISTED, {"items": [objects.job(name, None) for name in names]})
    with pytest.raises(ClusterError) as caught:
        cluster.job("running")
    assert str(caught.value) == f"there is no FineTuneJob running in the namespace team; {hint}"
    assert caught.value.exit_code == 2


def test_a_cluster_without_the_definition_is_told_from_one_without_the_job(cluster: Cluster) -> None:
    ANSWERS[f"{JOBS}/running"] = (404, "404 page not found\n")
    with pytest.raises(ClusterError, match=r"does not serve finetune\.dev/v1alpha1: install the chart") as caught:
        cluster.job("running")
    assert caught.value.exit_code == 3
    ANSWERS[LISTED] = failure(404, "NotFound", "the server could not find the requested resource")
    with pytest.raises(ClusterError, match="install the chart"):
        cluster.jobs()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RequestError("no answer: timed out"), "https://api: no answer: timed out; check that the cluster can be reached"),
        (RequestError("401", 401), "https://api does not know you: log in again"),
        (RequestError("403", 403), "you may not list pods in the namespace team; ask for a Role that permits it"),
        (RequestError("503 \x1b[2J", 503), "503 \\x1b[2J; the cluster is overloaded or starting, try again"),
        (RequestError("409 conflict", 409), "409 conflict"),
    ],
)
def test_each_refusal_is_told_with_what_to_do(error: RequestError, message: str) -> None:
    found = cluster_error(error, "GET", "/api/v1/namespaces/team/pods", "https://api")
    assert message in str(found)
    assert found.exit_code == 3


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("GET", "/api/v1/namespaces/team/pods/a/log", Right("get", "pods/log", "", "team")),
        ("GET", "/apis/finetune.dev/v1alpha1/finetunejobs", Right("list", "finetunejobs", "finetune.dev")),
        ("PATCH", f"{JOBS}/a", Right("patch", "finetunejobs", "finetune.dev", "team")),
        ("POST", "/api/v1/namespaces/team/pods", Right("create", "pods", "", "team")),
    ],
)
def test_a_request_names_the_right_that_it_needs(method: str, path: str, right: Right) -> None:
    assert right_for(method, path) == right
    assert right_for("GET", "/version") is None


def test_what_is_only_nice_to_have_does_not_end_a_command(cluster: Cluster) -> None:
    def profile() -> dict[str, Any] | None:
        return cluster.get("finetune.dev/v1alpha1", "finetuneprofiles", "default", "")

    ANSWERS["/apis/finetune.dev/v1alpha1/finetuneprofiles/default"] = failure(403, "Forbidden", "no")
    found = unless_refused(profile)
    assert isinstance(found, Unseen)
    assert "you may not get finetuneprofiles.finetune.dev in the whole cluster" in found.reason
    ANSWERS["/apis/finetune.dev/v1alpha1/finetuneprofiles/default"] = failure(404, "NotFound", "no", name="default")
    assert profile() is None


def test_pods_and_events_of_a_job_are_its_own(cluster: Cluster) -> None:
    from finetune_cli.jobs.seen import seen_job

    job = seen_job(objects.RUNNING)
    pods = [objects.pod(objects.RUNNING, "train", 1, index) for index in (1, 0)]
    answer("/api/v1/namespaces/team/pods?labelSelector=finetune.dev%2Fjob-uid%3Duid-2&limit=500", {"items": pods})
    found = cluster.pods_of(job)
    assert [pod.name for pod in found] == ["running-train-1-0", "running-train-1-1"]

    def event(kind: str, name: str, uid: str, time: str) -> dict[str, Any]:
        return {"involvedObject": {"kind": kind, "name": name, "uid": uid}, "lastTimestamp": time, "message": name}

    events = [
        event("FineTuneJob", "running", "uid-2", "2026-03-01T10:03:00Z"),
        event("Pod", "running-train-1-0", "pod-running-train-1-0", "2026-03-01T10:02:00Z"),
        event("Job", "running-train-1", "other", "2026-03-01T10:01:00Z"),
        event("Job", "running-train-1-more", "other", "2026-03-01T10:01:00Z"),
        event("Pod", "somebody", "else", "2026-03-01T10:01:00Z"),
    ]
    answer("/api/v1/namespaces/team/events?limit=500", {"items": events})
    assert [each.message for each in cluster.events_of(job, found)] == ["running-train-1", "running-train-1-0", "running"]


def test_lines_of_a_log_come_as_they_are(cluster: Cluster) -> None:
    path = "/api/v1/namespaces/team/pods/a/log"
    ANSWERS[f"{path}?follow=true"] = (200, "one\n\ntwo\nrest")
    assert list(cluster.lines(path, {"follow": "true"}, 5)) == ["one", "", "two", "rest"]
    ANSWERS[path] = failure(403, "Forbidden", "no")
    with pytest.raises(ClusterError, match="you may not get pods/log in the namespace team"):
        list(cluster.lines(path, {}, 5))
