"""The objects that a job owns."""

from __future__ import annotations

import re
from typing import Any

import pytest

from finetune_job.api.output import RetainPolicy, VolumeClaimTemplate
from finetune_job.names import CREDENTIALS_MOUNT, LABEL_ROLE, PLAN_KEY, TRAIN_GRACE_PERIOD_SECONDS, Role, master_address
from finetune_job.plan.digest import canonical_json, plan_sha256
from finetune_operator.children.claims import claims_named_by, workspace_claim
from finetune_operator.children.fetch_job import fetch_job
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.merge_job import merge_job
from finetune_operator.children.ownership import Owner
from finetune_operator.children.plan_configmap import plan_configmap
from finetune_operator.children.pod_template import claim_access
from finetune_operator.children.preflight_job import preflight_job
from finetune_operator.children.publish_job import publish_job
from finetune_operator.children.service import gang_service
from finetune_operator.children.train_job import train_job
from tests.support.builders import UID, JobBuilder, a_job

OWNER = Owner("team", "tune", UID)
BUILDERS = {
    Role.FETCH: fetch_job,
    Role.PREFLIGHT: preflight_job,
    Role.TRAIN: train_job,
    Role.MERGE: merge_job,
    Role.PUBLISH: publish_job,
}
ELSEWHERE = (
    a_job()
    .spec("model", {"source": "hf://org/base", "revision": "a" * 40})
    .spec("data.source", "s3://bucket/train.jsonl")
    .spec("fetch", {"hubTokenSecretRef": {"name": "hub", "key": "read"}, "s3SecretRef": {"name": "store"}})
)
"""A job whose model and data are fetched with credentials."""
KEYS = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]


def run_of(job: JobBuilder) -> FrozenRun:
    plan = job.plan()
    assert plan.placement is not None
    return FrozenRun(Owner("team", plan.job.name, UID), plan, plan.placement, plan_sha256(plan))


def pod_spec(body: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = body["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("role", Role)
def test_pods_pass_pod_security_restricted(role: Role) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, control by control."""
    pod = pod_spec(BUILDERS[role](run_of(a_job()), 0))
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
    plain = pod_spec(BUILDERS[role](run_of(a_job()), 0))
    assert not {"runAsUser", "fsGroup"} & set(plain["securityContext"])
    chosen = pod_spec(BUILDERS[role](run_of(a_job().with_profile(runAsUser=1234, fsGroup=5678)), 0))
    assert (chosen["securityContext"]["runAsUser"], chosen["securityContext"]["fsGroup"]) == (1234, 5678)


@pytest.mark.parametrize("role", Role)
def test_requests_equal_limits_and_only_training_takes_accelerators(role: Role) -> None:
    profile = {"resources": {str(role): {"cpu": "3", "memory": "7Gi", "sharedMemory": "2Gi"}}}
    pod = pod_spec(BUILDERS[role](run_of(a_job().processes_per_node(4).with_profile(**profile)), 0))
    resources = pod["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    gpus = {"nvidia.com/gpu": "4"} if role is Role.TRAIN else {}
    assert resources["limits"] == {"cpu": "3", "memory": "7Gi", **gpus}
    shared = next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


def test_a_profile_without_accelerators_asks_for_none() -> None:
    pod = pod_spec(train_job(run_of(a_job().with_profile(gpu=None)), 0))
    assert set(pod["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}


def test_a_gang_lives_and_dies_as_one() -> None:
    spec = train_job(run_of(a_job().nodes(4)), 2)["spec"]
    template = spec.pop("template")
    assert spec == {
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]},
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


@pytest.mark.parametrize("role", [Role.FETCH, Role.PREFLIGHT, Role.MERGE, Role.PUBLISH])
def test_the_arguments_of_a_cpu_pod(role: Role) -> None:
    run = run_of(a_job())
    arguments = pod_spec(BUILDERS[role](run, 1))["containers"][0]["args"]
    assert arguments == [str(role), "--plan", "/plan/plan.json", "--plan-sha256", run.plan_sha256, "--attempt", "1"]


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


def test_the_service_finds_the_training_pods_before_they_are_ready() -> None:
    service = gang_service(OWNER)["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    for role in Role:
        labels = BUILDERS[role](run_of(a_job()), 0)["spec"]["template"]["metadata"]["labels"]
        assert (service["selector"].items() <= labels.items()) is (role is Role.TRAIN)


@pytest.mark.parametrize("role", Role)
def test_children_belong_to_the_job_and_say_what_they_are(role: Role) -> None:
    run = run_of(a_job())
    body = BUILDERS[role](run, 1)
    (reference,) = body["metadata"]["ownerReferences"]
    assert (reference["uid"], reference["controller"], reference["kind"]) == (UID, True, "FineTuneJob")
    labels = {"finetune.dev/job": "tune", "finetune.dev/job-uid": UID, LABEL_ROLE: str(role), "finetune.dev/attempt": "1"}
    assert labels.items() <= body["metadata"]["labels"].items()
    assert body["metadata"]["annotations"]["finetune.dev/plan-sha256"] == run.plan_sha256


def test_only_training_pods_are_bound_to_the_profiles_nodes() -> None:
    run = run_of(a_job().with_profile(nodeSelector={"gpu": "h100"}))
    assert pod_spec(train_job(run, 0))["nodeSelector"] == {"gpu": "h100"}
    assert "nodeSelector" not in pod_spec(preflight_job(run, 0))
    assert "nodeSelector" not in pod_spec(merge_job(run, 0))


def test_the_plans_config_map_holds_its_canonical_json() -> None:
    plan = a_job().plan()
    body = plan_configmap(OWNER, canonical_json(plan))
    assert body["data"] == {PLAN_KEY: canonical_json(plan)}
    assert body["metadata"]["annotations"]["finetune.dev/plan-sha256"] == plan_sha256(plan)
    assert body["immutable"] is True


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


def credential_sources(body: dict[str, Any]) -> list[tuple[str, bool, dict[str, str]]]:
    """Secret, whether it is optional, and file by key, of the volume that the container sees at its one place for credentials."""
    pod = pod_spec(body)
    (container,) = pod["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == CREDENTIALS_MOUNT]
    assert mount["readOnly"] is True
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    return [
        (each["secret"]["name"], each["secret"]["optional"], {item["key"]: item["path"] for item in each["secret"]["items"]})
        for each in volume["projected"]["sources"]
    ]


def test_the_fetch_pod_is_given_its_credentials_as_files() -> None:
    assert credential_sources(fetch_job(run_of(ELSEWHERE), 0)) == [
        ("hub", False, {"read": "hub/token"}),
        ("store", False, {key: f"s3/{key}" for key in KEYS}),
        ("store", True, {"AWS_SESSION_TOKEN": "s3/AWS_SESSION_TOKEN"}),
    ]


@pytest.mark.parametrize(
    ("destination", "expected"),
    [
        ("hf://org/tuned", [("writer", False, {"token": "hub/token"})]),
        (
            "s3://bucket/tuned",
            [
                ("writer", False, {key: f"s3/{key}" for key in KEYS}),
                ("writer", True, {"AWS_SESSION_TOKEN": "s3/AWS_SESSION_TOKEN"}),
            ],
        ),
        ("oci://registry.example/team/tuned:v1", [("writer", False, {".dockerconfigjson": "registry/config.json"})]),
    ],
)
def test_the_publish_pod_is_given_the_destinations_credentials_as_files(destination: str, expected: list[Any]) -> None:
    job = ELSEWHERE.spec("output", {"destination": destination, "secretRef": {"name": "writer"}})
    assert credential_sources(publish_job(run_of(job), 0)) == expected
    assert "writer" not in str(fetch_job(run_of(job), 0))


def test_no_other_pod_sees_a_secret() -> None:
    run = run_of(ELSEWHERE.spec("output", {"destination": "hf://org/tuned", "secretRef": {"name": "writer"}}))
    for role in (Role.PREFLIGHT, Role.TRAIN, Role.MERGE):
        assert "secret" not in str(BUILDERS[role](run, 0)).lower()
    for role in Role:
        variables = pod_spec(BUILDERS[role](run, 0))["containers"][0]["env"]
        assert {variable["name"] for variable in variables} <= {"HOME", "JOB_COMPLETION_INDEX"}


@pytest.mark.parametrize("role", [Role.FETCH, Role.PUBLISH])
def test_without_a_secret_there_is_no_volume_for_one(role: Role) -> None:
    job = ELSEWHERE.spec("fetch", None).spec("output.destination", "s3://bucket/tuned")
    assert CREDENTIALS_MOUNT not in str(BUILDERS[role](run_of(job), 0))


@pytest.mark.parametrize(("group", "mode"), [(5678, 0o440), (None, 0o444)])
def test_credentials_are_read_by_the_pods_group_or_where_none_is_known_by_its_user(group: int | None, mode: int) -> None:
    profile = {} if group is None else {"fsGroup": group}
    pod = pod_spec(fetch_job(run_of(ELSEWHERE.with_profile(**profile)), 0))
    (volume,) = [volume for volume in pod["volumes"] if "projected" in volume]
    assert volume["projected"]["defaultMode"] == mode


def test_what_is_fetched_and_published_passes_over_the_workspace_alone() -> None:
    job = ELSEWHERE.spec("output.destination", "hf://org/tuned")
    for role in Role:
        assert claim_access(job.plan(), role) == {"scratch": True}


@pytest.mark.parametrize("role", Role)
def test_one_claim_for_everything_is_mounted_once_and_writable(role: Role) -> None:
    job = a_job().spec("model.source", "pvc://all/base").spec("data.source", "pvc://all/d.jsonl")
    job = job.spec("output.destination", "pvc://all/out").spec("workspace", {"claimName": "all"})
    pod = pod_spec(BUILDERS[role](run_of(job), 0))
    mounts = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"].startswith("/claims/")]
    assert [(mount["mountPath"], mount["readOnly"]) for mount in mounts] == [("/claims/all", False)]
    assert len({volume["name"] for volume in pod["volumes"]}) == len(pod["volumes"])


def test_the_claims_of_a_job_are_those_that_its_pods_mount() -> None:
    job = a_job().spec("data.validation", {"source": "pvc://held-out/x.jsonl"})
    mounted = {claim for role in Role for claim in claim_access(job.plan(), role)}
    assert set(claims_named_by(job.parse().spec, "tune")) == mounted


@pytest.mark.parametrize(("retain", "owned"), [(RetainPolicy.KEEP, False), (RetainPolicy.DELETE, True)])
def test_a_workspace_claim_dies_with_its_job_only_where_that_is_asked_for(retain: RetainPolicy, owned: bool) -> None:
    template = VolumeClaimTemplate(storage="10Gi")
    body = workspace_claim(OWNER, template, retain, "fast")
    assert ("ownerReferences" in body["metadata"]) is owned
    assert body["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }
    assert "storageClassName" not in workspace_claim(OWNER, template, retain, None)["spec"]
