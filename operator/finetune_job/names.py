"""Names that more than one program must agree on: group, kinds, labels, child names, mount points, files of credentials.

Credentials are passed only as files that the kubelet mounts from a Secret, never in the plan, in variables or in arguments.
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
"""Label of a FineTuneJob with the team that is charged for it; without it, the namespace is charged."""
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "finetune-operator"
ANNOTATION_REPRODUCES = f"{GROUP}/reproduces"
"""Annotation of a job with the UID of the job that it reproduces."""
ANNOTATION_PLAN_SHA256 = f"{GROUP}/plan-sha256"

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""Label of a pod (on older clusters an annotation) with its index in an indexed Job."""
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Label of a node with the name of its devices, as NVIDIA's GPU feature discovery writes it."""
MERGE_PATCH = "application/merge-patch+json"
"""Content type of a patch: a null removes a field (RFC 7396)."""
TERMINATION_LOG = "/dev/termination-log"
"""Default path of the termination message in Kubernetes."""

PLAN_KEY = "plan.json"
PLAN_MOUNT = "/plan"
CLAIMS_MOUNT = "/claims"
"""Each claim that a pod may see is mounted at `/claims/<claim name>`."""
CA_MOUNT = "/authorities"
"""Directory with the certificates that fetch and publish trust, if the profile names any."""
CREDENTIALS_MOUNT = "/credentials"
"""Directory of each `CredentialFile`, mounted only in pods that may reach addresses outside the cluster."""
RENDEZVOUS_PORT = 29400
OBSERVE_PORT = 9400
"""Port on which rank 0 serves /metrics, /progress and /healthz."""

SHUTDOWN_SECONDS = 120
"""Time after SIGTERM in which the ranks agree on a step, finish it and save; torchrun then kills ranks that are still running."""
TRAIN_GRACE_PERIOD_SECONDS = SHUTDOWN_SECONDS + 30
"""Grace period of training pods, in which the supervisor can still write its report after torchrun has ended."""

MAX_JOB_NAME = 63
"""Longest name of a FineTuneJob that fits in a label; longer child names are shortened with a digest."""


class Role(StrEnum):
    """The role of a pod; each attempt of a role has its own batch Job."""

    FETCH = "fetch"
    PREFLIGHT = "preflight"
    TRAIN = "train"
    MERGE = "merge"
    PUBLISH = "publish"


def _shortened(base: str, suffix: str, limit: int) -> str:
    """Return `base + suffix` within `limit` characters: a digest of the base replaces what is cut off, and dots become dashes."""
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
    """Name of the NetworkPolicy of all pods of a job, or of those that may reach addresses outside the cluster."""
    return _shortened(job, "-ways-out" if ways_out else "-run", 63)


def workspace_folder(job: str, uid: str) -> str:
    """Return the folder of a job on its workspace claim; another job of the same name has a different folder."""
    return f"{job}-{uid[:8]}"


def workspace_claim_name(job: str) -> str:
    """Name of a workspace claim created from the job's template."""
    return _shortened(job, "-workspace", 63)


def batch_job_name(job: str, role: Role, attempt: int, nodes: int = 1) -> str:
    """Name of the Job of a role and attempt.

    An Indexed Job of N pods may have at most `62 - digits(N - 1)` characters, because each pod's hostname adds its index.
    """
    return _shortened(job, f"-{role}-{attempt}", 62 - len(str(max(nodes - 1, 0))))


def master_address(job: str, namespace: str, attempt: int, nodes: int) -> str:
    """Fully qualified DNS name of the pod with node rank 0."""
    return f"{batch_job_name(job, Role.TRAIN, attempt, nodes)}-0.{service_name(job)}.{namespace}.svc"


@dataclass(frozen=True)
class CredentialFile:
    """One key of a Secret as a file below the credentials' mount point."""

    key: str
    """Key in the Secret, unless the user names another."""
    path: str
    required: bool = True


HUB_TOKEN = CredentialFile("token", "hub/token")
S3_ACCESS_KEY_ID = CredentialFile("AWS_ACCESS_KEY_ID", "s3/AWS_ACCESS_KEY_ID")
S3_SECRET_ACCESS_KEY = CredentialFile("AWS_SECRET_ACCESS_KEY", "s3/AWS_SECRET_ACCESS_KEY")
S3_SESSION_TOKEN = CredentialFile("AWS_SESSION_TOKEN", "s3/AWS_SESSION_TOKEN", required=False)
REGISTRY_LOGINS = CredentialFile(".dockerconfigjson", "registry/config.json")
SIGNING_KEY = CredentialFile("signing.key", "signing/key")

S3_KEYS = (S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY, S3_SESSION_TOKEN)
