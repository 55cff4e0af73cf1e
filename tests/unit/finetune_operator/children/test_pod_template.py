"""What the Jobs of all roles share: security, resources and claims."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_job.names import Role
from finetune_operator.children.pod_template import claim_access
from finetune_operator.children.train_job import train_job
from tests.support.builders import a_job
from tests.unit.finetune_operator.children.building import ELSEWHERE, job_of, pod_spec, run_of


@pytest.mark.parametrize("role", Role)
def test_pods_pass_pod_security_restricted(role: Role) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, control by control."""
    pod = pod_spec(job_of(role, run_of(a_job())))
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["privileged"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert all("hostPort" not in port for port in container.get("ports", []))
        assert "command" not in container
        assert not any("secret" in str(variable).lower() for variable in container["env"])


@pytest.mark.parametrize("role", Role)
def test_identity_comes_from_the_profile_or_is_left_to_the_platform(role: Role) -> None:
    plain = pod_spec(job_of(role, run_of(a_job())))
    assert not {"runAsUser", "fsGroup", "supplementalGroups"} & set(plain["securityContext"])
    identity = {"runAsUser": 1234, "fsGroup": 5678, "supplementalGroups": [3000, 4000]}
    chosen = pod_spec(job_of(role, run_of(a_job().with_profile(**identity))))
    assert {name: chosen["securityContext"][name] for name in identity} == identity


@pytest.mark.parametrize("role", Role)
def test_requests_equal_limits_and_only_training_takes_accelerators(role: Role) -> None:
    profile = {"resources": {str(role): {"cpu": "3", "memory": "7Gi", "sharedMemory": "2Gi"}}}
    pod = pod_spec(job_of(role, run_of(a_job().processes_per_node(4).with_profile(**profile))))
    resources = pod["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    gpus = {"nvidia.com/gpu": "4"} if role is Role.TRAIN else {}
    assert resources["limits"] == {"cpu": "3", "memory": "7Gi", "ephemeral-storage": "8Gi", **gpus}
    shared = next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


def test_a_profile_without_accelerators_asks_for_none() -> None:
    pod = pod_spec(train_job(run_of(a_job().with_profile(gpu=None)), 0))
    assert set(pod["containers"][0]["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}


@pytest.mark.parametrize("role", Role)
def test_what_a_pod_may_put_on_the_nodes_disk_is_limited(role: Role) -> None:
    def shown(**profile: Any) -> tuple[Any, Any]:
        pod = pod_spec(job_of(role, run_of(a_job().with_profile(**profile))))
        tmp = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "tmp")
        return tmp, pod["containers"][0]["resources"]["limits"].get("ephemeral-storage")

    assert shown(scratchStorage="3Gi") == ({"sizeLimit": "3Gi"}, "3Gi")
    more = {"extraResources": {"ephemeral-storage": "20Gi"}}
    assert shown(scratchStorage="3Gi", pods={"cpu": more, "train": more}) == ({"sizeLimit": "3Gi"}, "20Gi")
    queued = {"queueName": "team"}
    assert shown(scratchStorage="3Gi", pods={"cpu": queued, "train": queued}) == ({"sizeLimit": "3Gi"}, None)


def test_a_run_that_was_frozen_without_a_limit_continues_without() -> None:
    run = run_of(a_job())
    older = replace(run, placement=run.placement.model_copy(update={"scratch_storage": None}))
    pod = pod_spec(train_job(older, 0))
    assert next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "tmp") == {}
    assert "ephemeral-storage" not in pod["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        (Role.FETCH, {"scratch": True}),
        (Role.PREFLIGHT, {"models": False, "data": False, "held-out": False, "scratch": True, "results": True}),
        (Role.TRAIN, {"models": False, "scratch": True}),
        (Role.MERGE, {"models": False, "data": False, "held-out": False, "scratch": True, "results": True}),
        (Role.PUBLISH, {"scratch": True}),
    ],
)
def test_a_role_may_write_to_workspace_and_output_only(role: Role, expected: dict[str, bool]) -> None:
    job = a_job().spec("data.validation", {"source": "pvc://held-out/x.jsonl"})
    assert claim_access(job.plan(), role) == expected


def test_what_is_fetched_and_published_passes_over_the_workspace_alone() -> None:
    job = ELSEWHERE.spec("output.destination", "hf://org/tuned")
    for role in Role:
        assert claim_access(job.plan(), role) == {"scratch": True}


@pytest.mark.parametrize("role", Role)
def test_one_claim_for_everything_is_mounted_once_and_writable(role: Role) -> None:
    job = a_job().spec("model.source", "pvc://all/base").spec("data.source", "pvc://all/d.jsonl")
    job = job.spec("output.destination", "pvc://all/out").spec("workspace", {"claimName": "all"})
    pod = pod_spec(job_of(role, run_of(job)))
    mounts = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"].startswith("/claims/")]
    assert [(mount["mountPath"], mount["readOnly"]) for mount in mounts] == [("/claims/all", False)]
    assert len({volume["name"] for volume in pod["volumes"]}) == len(pod["volumes"])
