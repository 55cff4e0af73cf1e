"""Credentials as files that the kubelet mounts from the user's Secrets; neither the operator nor the plan ever holds one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune_job.api.base import BucketPath, HubPath, parse_destination
from finetune_job.names import HUB_TOKEN, REGISTRY_LOGINS, S3_KEYS, SIGNING_KEY, CredentialFile
from finetune_job.plan.launch_plan import FetchPlan, LaunchPlan, PublishPlan

VOLUME_NAME = "credentials"
_GROUP_READS = 0o440


def credentials_volume(sources: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The volume with these files. They are in memory, and mounted in no other container.

    The kubelet writes files of a Secret as root, for the pod's fsGroup where it has one, and for group 0 otherwise; no setting
    makes the container's user their owner. A user that is not root reads them as a member of that group: the kubelet adds each
    process to the fsGroup, and the trainer image, as every user without an entry in its /etc/passwd, is in group 0.
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
    """The fetch pod's credentials as environment variables, for images of the one release that could fetch but not publish.

    A run keeps the image that its plan names, whichever release of the operator manages it.
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
    signing = [] if signing_key_secret is None else _secret(signing_key_secret, (SIGNING_KEY,))
    return _of_destination(publish) + signing


def _of_destination(publish: PublishPlan) -> list[dict[str, Any]]:
    if publish.secret is None:
        return []
    match parse_destination(publish.destination):
        case HubPath():
            return _secret(publish.secret, (HUB_TOKEN,))
        case BucketPath():
            return _secret(publish.secret, S3_KEYS)
        case _:
            return _secret(publish.secret, (REGISTRY_LOGINS,))


def _secret(name: str, files: tuple[CredentialFile, ...], key: str | None = None) -> list[dict[str, Any]]:
    """One source for the required keys and one for the optional ones, because `optional` applies to a whole source."""
    sources = []
    for required in (True, False):
        items = [{"key": key or file.key, "path": file.path} for file in files if file.required is required]
        if items:
            sources.append({"secret": {"name": name, "items": items, "optional": not required}})
    return sources
