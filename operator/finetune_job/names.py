"""Names that more than one program must agree on: group, kinds, labels, child names, mount points, files of credentials.

Credentials travel as files that the kubelet mounts from a Secret, and in no other way: not in the plan, not in variables, not
in arguments.
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
"""On a FineTuneJob: who is charged for it. Without it its namespace is."""
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "finetune-operator"
ANNOTATION_REPRODUCES = f"{GROUP}/reproduces"
"""UID of the job that a job runs again."""
ANNOTATION_PLAN_SHA256 = f"{GROUP}/plan-sha256"

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""On a pod, and on older clusters an annotation of it: which pod of an indexed Job it is."""
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
"""What NVIDIA's GPU feature discovery calls the label of a node with the name of its devices."""
MERGE_PATCH = "application/merge-patch+json"
"""Content type of a patch: a null removes a field (RFC 7396)."""
TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes looks for a termination message by default."""

PLAN_KEY = "plan.json"
PLAN_MOUNT = "/plan"
CLAIMS_MOUNT = "/claims"
"""Each claim that a pod may see is mounted at `/claims/<claim name>`."""
CA_MOUNT = "/authorities"
"""Certificates that fetch and publish trust, if the profile names some."""
ATTEMPT_MOUNT = "/attempt"
ATTEMPT_FILE = "number"
"""A container that was started again reads in this file below `ATTEMPT_MOUNT` which attempt it may run: the pod's label."""
CREDENTIALS_MOUNT = "/credentials"
"""Where the kubelet puts each `CredentialFile`; only pods with a way out of the cluster have them."""
RENDEZVOUS_PORT = 29400
OBSERVE_PORT = 9400
"""Rank 0 serves /metrics, /progress and /healthz here."""

SHUTDOWN_SECONDS = 120
"""After SIGTERM the ranks agree on a step, finish it and save; torchrun kills what is not done by then."""
TRAIN_GRACE_PERIOD_SECONDS = SHUTDOWN_SECONDS + 30
"""Of training pods: the supervisor writes its report after torchrun has ended."""

MAX_JOB_NAME = 63
"""Longest name of a FineTuneJob that fits in a label; longer child names are shortened with a digest."""


class Role(StrEnum):
    """What a pod does; one batch Job per role (and, for training, per attempt)."""

    FETCH = "fetch"
    PREFLIGHT = "preflight"
    TRAIN = "train"
    MERGE = "merge"
    PUBLISH = "publish"


def _shortened(base: str, suffix: str, limit: int) -> str:
    """`base + suffix` within `limit` characters; a digest of the base stands for what is cut off, and dots become dashes."""
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
    """Name of the NetworkPolicy of all pods of a job, or of those with a way out of the cluster."""
    return _shortened(job, "-ways-out" if ways_out else "-run", 63)


def workspace_folder(job: str, uid: str) -> str:
    """Of a job on its workspace claim: another job of the same name finds nothing of it."""
    return f"{job}-{uid[:8]}"


def workspace_claim_name(job: str) -> str:
    """Name of a workspace claim made from the job's template."""
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
    """In the Secret, unless the user names another."""
    path: str
    required: bool = True


HUB_TOKEN = CredentialFile("token", "hub/token")
S3_ACCESS_KEY_ID = CredentialFile("AWS_ACCESS_KEY_ID", "s3/AWS_ACCESS_KEY_ID")
S3_SECRET_ACCESS_KEY = CredentialFile("AWS_SECRET_ACCESS_KEY", "s3/AWS_SECRET_ACCESS_KEY")
S3_SESSION_TOKEN = CredentialFile("AWS_SESSION_TOKEN", "s3/AWS_SESSION_TOKEN", required=False)
REGISTRY_LOGINS = CredentialFile(".dockerconfigjson", "registry/config.json")
SIGNING_KEY = CredentialFile("signing.key", "signing/key")

S3_KEYS = (S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY, S3_SESSION_TOKEN)
