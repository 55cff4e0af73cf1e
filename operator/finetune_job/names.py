"""Names on which several programs must agree: API group, kinds, labels, child names, mount points, credential files.

Credentials are passed only as files that the kubelet mounts from a Secret, never in the plan, environment or arguments.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

GROUP = "finetune.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
JOB_KIND = "FineTuneJob"
JOB_PLURAL = "finetunejobs"
PROFILE_KIND = "FineTuneProfile"
PROFILE_PLURAL = "finetuneprofiles"
DEFAULT_PROFILE = "default"
"""The profile of a job that names none; the chart installs it."""

LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_ROLE = f"{GROUP}/role"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_TEAM = f"{GROUP}/team"
"""Label of a FineTuneJob that names the team to charge; without this label, the namespace is charged."""
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "finetune-operator"
ANNOTATION_REPRODUCES = f"{GROUP}/reproduces"
"""Annotation with the UID of the earlier job that this job reproduces."""
ANNOTATION_PLAN_SHA256 = f"{GROUP}/plan-sha256"

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""Label of a pod with its index in an Indexed Job; an annotation on older clusters."""
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Node label with the product name of the GPUs, which NVIDIA's GPU feature discovery sets."""
MERGE_PATCH = "application/merge-patch+json"
"""Content type of a JSON merge patch, in which null removes a field (RFC 7396)."""
TERMINATION_LOG = "/dev/termination-log"
"""Default path of the termination message in Kubernetes."""

PLAN_KEY = "plan.json"
PLAN_MOUNT = "/plan"
CLAIMS_MOUNT = "/claims"
"""Directory under which a pod's claims are mounted, at `/claims/<claim name>`."""
CA_MOUNT = "/authorities"
"""Directory of the CA certificates that fetch and publish trust, if the profile names any."""
CREDENTIALS_MOUNT = "/credentials"
"""Directory of each `CredentialFile`, mounted only in pods that may reach addresses outside the cluster."""
RENDEZVOUS_PORT = 29400
OBSERVE_PORT = 9400
"""Port on which rank 0 serves /metrics, /progress and /healthz."""

SHUTDOWN_SECONDS = 120
"""Time that ranks have after SIGTERM to agree on a step, finish it and save; torchrun then kills ranks that are still running."""
TRAIN_GRACE_PERIOD_SECONDS = SHUTDOWN_SECONDS + 30
"""Grace period of training pods: long enough for the supervisor to write its report after torchrun has ended."""

MAX_JOB_NAME = 63
"""Maximum length of a FineTuneJob's name, so that it fits in a label; child names that get too long are cut, with a digest."""


class Role(StrEnum):
    """The role of a pod; each attempt of a role has its own batch Job."""

    FETCH = "fetch"
    PREFLIGHT = "preflight"
    TRAIN = "train"
    MERGE = "merge"
    PUBLISH = "publish"


def _shortened(base: str, suffix: str, limit: int) -> str:
    """Return `base + suffix` in at most `limit` characters: what is cut off is replaced by a digest, and dots become dashes."""
    plain = base.replace(".", "-")
    if plain == base and len(base) + len(suffix) <= limit:
        return base + suffix
    digest = hashlib.sha256(base.encode()).hexdigest()[:8]
    return f"{plain[: limit - len(suffix) - 9].rstrip('-')}-{digest}{suffix}"


def plan_configmap_name(job: str) -> str:
    """Name of the ConfigMap that holds the RunPlan."""
    return _shortened(job, "-plan", 63)


def service_name(job: str) -> str:
    """Name of the headless Service of the gang; part of every rank's DNS name, hence at most 63 characters."""
    return _shortened(job, "-gang", 63)


def network_policy_name(job: str, *, ways_out: bool = False) -> str:
    """Name of the NetworkPolicy for all pods of a job or, with `ways_out`, for the pods that may reach outside the cluster."""
    return _shortened(job, "-ways-out" if ways_out else "-run", 63)


def workspace_folder(job: str, uid: str) -> str:
    """Return the folder of a job on its workspace claim; a later job with the same name has a different folder."""
    return f"{job}-{uid[:8]}"


def workspace_claim_name(job: str) -> str:
    """Name of the workspace claim that is created from the job's template."""
    return _shortened(job, "-workspace", 63)


def batch_job_name(job: str, role: Role, attempt: int, nodes: int = 1) -> str:
    """Name of the Job of a role and attempt.

    The name of an Indexed Job of N pods has at most `62 - digits(N - 1)` characters, because a pod's hostname appends its index.
    """
    return _shortened(job, f"-{role}-{attempt}", 62 - len(str(max(nodes - 1, 0))))


def master_address(job: str, namespace: str, attempt: int, nodes: int) -> str:
    """Fully qualified DNS name of the pod with node rank 0."""
    return f"{batch_job_name(job, Role.TRAIN, attempt, nodes)}-0.{service_name(job)}.{namespace}.svc"


@dataclass(frozen=True)
class CredentialFile:
    """A key of a Secret that is mounted as a file in the credentials directory."""

    key: str
    """Default key in the Secret; the user may name another."""
    path: str
    required: bool = True


HUB_TOKEN = CredentialFile("token", "hub/token")
S3_ACCESS_KEY_ID = CredentialFile("AWS_ACCESS_KEY_ID", "s3/AWS_ACCESS_KEY_ID")
S3_SECRET_ACCESS_KEY = CredentialFile("AWS_SECRET_ACCESS_KEY", "s3/AWS_SECRET_ACCESS_KEY")
S3_SESSION_TOKEN = CredentialFile("AWS_SESSION_TOKEN", "s3/AWS_SESSION_TOKEN", required=False)
REGISTRY_LOGINS = CredentialFile(".dockerconfigjson", "registry/config.json")
SIGNING_KEY = CredentialFile("signing.key", "signing/key")

S3_KEYS = (S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY, S3_SESSION_TOKEN)
