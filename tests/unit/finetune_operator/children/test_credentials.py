"""Which pods are given which Secrets, and how."""

from typing import Any

import pytest

from finetune_job.names import CREDENTIALS_MOUNT, Role
from finetune_operator.children.cpu_jobs import cpu_job
from tests.unit.finetune_operator.children.building import ELSEWHERE, job_of, pod_spec, run_of

KEYS = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]


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
    assert credential_sources(cpu_job(run_of(ELSEWHERE), Role.FETCH, 0)) == [
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
    assert credential_sources(cpu_job(run_of(job), Role.PUBLISH, 0)) == expected
    assert "writer" not in str(cpu_job(run_of(job), Role.FETCH, 0))


@pytest.mark.parametrize("role", Role)
def test_what_speaks_to_the_outside_trusts_the_authorities_of_the_profile(role: Role) -> None:
    job = ELSEWHERE.with_profile(caBundle={"configMap": "company-ca", "key": "bundle.pem"})
    pod = pod_spec(job_of(role, run_of(job)))
    (container,) = pod["containers"]
    volumes = [volume["configMap"] for volume in pod["volumes"] if volume["name"] == "authorities"]
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "authorities"]
    variables = [one["value"] for one in container["env"] if one["name"] == "SSL_CERT_FILE"]
    if role in (Role.FETCH, Role.PUBLISH):
        assert volumes == [{"name": "company-ca", "items": [{"key": "bundle.pem", "path": "ca.crt"}]}]
        assert mounts == [{"name": "authorities", "mountPath": "/authorities", "readOnly": True}]
        assert variables == ["/authorities/ca.crt"]
    else:
        assert (volumes, mounts, variables) == ([], [], [])
    assert "authorities" not in str(job_of(role, run_of(ELSEWHERE)))


def test_only_the_publish_pod_is_given_the_key_that_signs() -> None:
    job = ELSEWHERE.spec("output", {"destination": "hf://org/tuned", "secretRef": {"name": "writer"}})
    run = run_of(job.with_profile(publish={"signingKeySecret": {"name": "model-signing"}}))
    assert credential_sources(cpu_job(run, Role.PUBLISH, 0)) == [
        ("writer", False, {"token": "hub/token"}),
        ("model-signing", False, {"signing.key": "signing/key"}),
    ]
    for role in (Role.FETCH, Role.PREFLIGHT, Role.TRAIN, Role.MERGE):
        assert "model-signing" not in str(job_of(role, run))


def test_no_other_pod_sees_a_secret() -> None:
    run = run_of(ELSEWHERE.spec("output", {"destination": "hf://org/tuned", "secretRef": {"name": "writer"}}))
    for role in (Role.PREFLIGHT, Role.TRAIN, Role.MERGE):
        assert "secret" not in str(job_of(role, run)).lower()
    for role in Role:
        variables = pod_spec(job_of(role, run))["containers"][0]["env"]
        assert {variable["name"] for variable in variables} <= {"HOME", "JOB_COMPLETION_INDEX"}


@pytest.mark.parametrize("role", [Role.FETCH, Role.PUBLISH])
def test_without_a_secret_there_is_no_volume_for_one(role: Role) -> None:
    job = ELSEWHERE.spec("fetch", None).spec("output.destination", "s3://bucket/tuned")
    assert CREDENTIALS_MOUNT not in str(job_of(role, run_of(job)))


@pytest.mark.parametrize("profile", [{"fsGroup": 5678}, {}])
def test_nobody_but_root_and_the_pods_group_reads_credentials(profile: dict[str, Any]) -> None:
    """Without an fsGroup that is group 0, which the image names: tests/e2e runs the pods so."""
    pod = pod_spec(cpu_job(run_of(ELSEWHERE.with_profile(**profile)), Role.FETCH, 0))
    (volume,) = [volume for volume in pod["volumes"] if "projected" in volume]
    assert volume["projected"]["defaultMode"] == 0o440
