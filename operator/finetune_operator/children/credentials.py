"""Credentials as files that the kubelet mounts from the user's Secrets. Neither the operator nor the plan ever contains them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune_job.api.base import BucketPath, HubPath, parse_destination
from finetune_job.names import HUB_TOKEN, REGISTRY_LOGINS, S3_KEYS, SIGNING_KEY, CredentialFile
from finetune_job.plan.launch_plan import FetchPlan, LaunchPlan, PublishPlan

VOLUME_NAME = "credentials"
_GROUP_READS = 0o440


def credentials_volume(sources: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Build the volume with these files. The files are kept in memory, and no other container mounts them.

    A Secret's files are owned by root, and their group is the pod's fsGroup, or group 0 if that is unset; no setting can make the
    container's user their owner. A user other than root can read them as a member of that group: the kubelet adds each process to
    the fsGroup, and the trainer image's user is in group 0, like every user without an entry in /etc/passwd.
    """
    return {"name": VOLUME_NAME, "projected": {"defaultMode": _GROUP_READS, "sources": list(sources)}}


def fetch_credentials(fetch: FetchPlan) -> list[dict[str, Any]]:
    """Sources of a projected volume with the credentials of the fetch pod."""
    sources = []
    if fetch.hub_token is not None:
        sources += _secret(fetch.hub_token.name, (HUB_TOKEN,), key=fetch.hub_token.key)
    if fetch.s3_secret is not None:
        sources += _secret(fetch.s3_secret, S3_KEYS)
    return sources


def variables_of_old_images(plan: LaunchPlan) -> list[dict[str, Any]]:
    """Return the fetch pod's credentials as environment variables, for images of releases that could fetch but not yet publish.

    A run keeps the image that its plan names, no matter which release of the operator manages it.
    """
    if plan.fetch is None or "publish" in plan.model_fields_set:
        return []
    token, keys = plan.fetch.hub_token, plan.fetch.s3_secret
    variables = [] if token is None else [_variable("HF_TOKEN", token.name, token.key, required=True)]
    if keys is not None:
        variables += [_variable(file.key, keys, file.key, required=file.required) for file in S3_KEYS]
    return variables


def _variable(name: str, secret: str, key: str, *, required: bool) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": not required}}}


def publish_credentials(publish: PublishPlan, signing_key_secret: str | None = None) -> list[dict[str, Any]]:
    """Sources of a projected volume with the credentials of the publish pod and the key that it signs with."""
    sources = []
    if publish.secret is not None:
        destination = parse_destination(publish.destination)
        is_hub, is_bucket = isinstance(destination, HubPath), isinstance(destination, BucketPath)
        sources += _secret(publish.secret, (HUB_TOKEN,) if is_hub else S3_KEYS if is_bucket else (REGISTRY_LOGINS,))
    if signing_key_secret is not None:
        sources += _secret(signing_key_secret, (SIGNING_KEY,))
    return sources


def _secret(name: str, files: tuple[CredentialFile, ...], key: str | None = None) -> list[dict[str, Any]]:
    """Return one source with the required keys and one with the optional keys, because `optional` applies to a whole source."""
    sources = []
    for required in (True, False):
        items = [{"key": key or file.key, "path": file.path} for file in files if file.required is required]
        if items:
            sources.append({"secret": {"name": name, "items": items, "optional": not required}})
    return sources
