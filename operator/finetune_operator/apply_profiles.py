"""`python -m finetune_operator.apply_profiles FILE`: apply the FineTuneProfiles of a release to the cluster.

It runs in each operator pod before the operator starts. Helm cannot do this itself: it looks up every kind before it installs
anything, and the profiles' CRD may be part of the same release. A hook would delete each profile and create it again.

FILE is a JSON list of `Wanted`, which is validated completely before the first request. A profile is applied with server-side
apply, with its own field manager and without force, and only if its content differs from what was applied last. So a restart
changes nothing, and an upgrade that would overwrite a person's changes fails with an error. Each profile is owned by an object of
the release, so that both are deleted together.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio.config import ConfigException
from pydantic import ValidationError

from finetune_job.api.base import ApiModel
from finetune_job.api.pod_settings import ObjectName
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import GROUP
from finetune_operator.client.access import load_configuration
from finetune_operator.client.answers import ApiError, ApiUnreachableError, Document
from finetune_operator.client.api import Api
from finetune_operator.client.discovery import CrdsMissingError, wait_for_crds
from finetune_operator.client.kinds import CLUSTER_ROLES, PROFILES
from finetune_operator.logs import configure_logs, logger

FIELD_MANAGER = "finetune-operator-chart"
DIGEST_ANNOTATION = f"{GROUP}/applied-digest"
"""SHA-256 of the content that was applied last."""
_RELEASE_LABELS = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by")
CRD_WAIT = 300.0
CRD_POLL = 1.0
"""Seconds to wait for the CRDs, and seconds between two checks for them."""
_log = logger(__name__)


class ProfileError(Exception):
    """A profile cannot be applied; the message says which one, why, and what to do."""


class Wanted(ApiModel):
    """A profile as the release's chart defines it."""

    name: ObjectName
    owner: ObjectName
    """Name of the ClusterRole that owns the profile, so that both are deleted together."""
    labels: dict[str, str]
    spec: FineTuneProfileSpec


@dataclass(frozen=True)
class Profile:
    """A profile to apply."""

    wanted: Wanted
    spec: dict[str, Any]
    """The spec as written, without defaults: the API server fills these in, and no field manager should own them."""

    @property
    def digest(self) -> str:
        """Digest of everything that is applied, except the owner reference, which needs a UID from the server."""
        content = json.dumps([self.wanted.labels, self.wanted.owner, self.spec], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def document(self, owner_uid: str) -> Document:
        """Return the object to send to the server."""
        owner = {"apiVersion": CLUSTER_ROLES.api_version, "kind": CLUSTER_ROLES.name, "name": self.wanted.owner, "uid": owner_uid}
        metadata = {
            "name": self.wanted.name,
            "labels": self.wanted.labels,
            "annotations": {DIGEST_ANNOTATION: self.digest},
            "ownerReferences": [owner],
        }
        return {"apiVersion": PROFILES.api_version, "kind": PROFILES.name, "metadata": metadata, "spec": self.spec}


def read_profiles(text: str) -> list[Profile]:
    """Read the profiles. Raises ProfileError with field, value and reason for the first invalid profile."""
    profiles = []
    for entry in json.loads(text):
        try:
            profiles.append(Profile(Wanted.model_validate(entry), entry["spec"]))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            name = entry.get("name") if isinstance(entry, dict) else None
            raise ProfileError(
                f"profile {name}: {place} is {first['input']!r}: {first['msg']}; correct profiles.{name} of the chart's values "
                "(kubectl explain finetuneprofile.spec)"
            ) from error
    return profiles


async def apply(api: Api, profiles: Iterable[Profile]) -> None:
    """Apply new and changed profiles. After trying all of them, raises ProfileError with those that the server refused."""
    refused = []
    for profile in profiles:
        try:
            await _apply_one(api, profile)
        except ProfileError as error:
            refused.append(str(error))
    if refused:
        raise ProfileError("; ".join(refused))


async def _apply_one(api: Api, profile: Profile) -> None:
    wanted = profile.wanted
    owner = await api.get(CLUSTER_ROLES, None, wanted.owner)
    if owner is None:
        raise ProfileError(
            f"profile {wanted.name}: the ClusterRole {wanted.owner} does not exist; install the chart with rbac.create=true"
        )
    uid = str(owner["metadata"]["uid"])
    metadata = (await api.get(PROFILES, None, wanted.name) or {}).get("metadata", {})
    applied = (metadata.get("annotations") or {}).get(DIGEST_ANNOTATION)
    if applied == profile.digest and uid in [reference.get("uid") for reference in metadata.get("ownerReferences") or []]:
        _log.info("profile is up to date", profile=wanted.name)
        return
    # A profile that this release created as a Helm hook, with a chart before 0.2, is also ours.
    ours = {label: wanted.labels.get(label) for label in _RELEASE_LABELS}
    is_taken_over = applied is None and ours.items() <= (metadata.get("labels") or {}).items()
    try:
        await api.apply(PROFILES, wanted.name, profile.document(uid), FIELD_MANAGER, force=is_taken_over)
    except ApiError as error:
        fix = (
            "give these fields the same values in profiles."
            f"{wanted.name} of the chart's values, or undo the change (kubectl edit finetuneprofile {wanted.name})"
            if error.is_conflict
            else f"correct profiles.{wanted.name} of the chart's values"
        )
        raise ProfileError(f"profile {wanted.name} stays as it is: {error.message}; {fix}") from error
    _log.info("profile applied", profile=wanted.name, digest=profile.digest)


async def _run(profiles: list[Profile]) -> None:
    api = Api(await load_configuration())
    try:
        await wait_for_crds(api, CRD_WAIT, CRD_POLL)
        await apply(api, profiles)
    finally:
        await api.close()


def main(arguments: list[str]) -> int:
    """Apply the profiles of a file. Returns the exit code."""
    configure_logs("info")
    (file,) = arguments
    try:
        asyncio.run(_run(read_profiles(Path(file).read_text())))
    except (ProfileError, CrdsMissingError, ConfigException, ApiError, ApiUnreachableError) as error:
        _log.error("cannot apply the profiles of the release", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
