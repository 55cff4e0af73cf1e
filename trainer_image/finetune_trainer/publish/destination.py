"""The interface that every kind of destination implements, and the errors of destinations, which name the field to fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from finetune_trainer.errors import DestinationRefusedError, DestinationUnavailableError
from finetune_trainer.release.files import Release

DESTINATION_FIELD = "spec.output.destination"
SECRET_FIELD = "spec.output.secretRef"  # noqa: S105 - the name of a field


@dataclass(frozen=True)
class Publication:
    """A published release."""

    address: str
    """Address with the commit or digest of this content, such as `oci://host/name:tag@sha256:...`."""
    digest: str
    """Commit, manifest digest, or SHA-256 of the manifest."""
    bytes_sent: int
    """Number of bytes sent in this attempt; content that already exists at the destination is not sent again."""


class Destination(Protocol):
    """A place outside the cluster. Until the whole release is there, its readers see either nothing or the previous content."""

    def publish(self, release: Release) -> Publication:
        """Publish the release. If a call is killed at any point, the next one sends only what is missing.

        Raises DestinationRefusedError if a human has to act (on credentials, names, or other content at the destination), and
        DestinationUnavailableError if another attempt may help.
        """


def destination_unavailable(message: str) -> DestinationUnavailableError:
    """Return the error for requests that keep failing."""
    return DestinationUnavailableError(
        message,
        "files already there are not sent again; check the network access out of the cluster and the profile's spec.publish",
    )


def access_denied(what: str, detail: str, *, signed: bool, secret_holds: str) -> DestinationRefusedError:
    """Return the error for HTTP status 401 or 403.

    signed: whether the request had credentials. secret_holds: what the Secret must hold and, for local runs, where it comes from.
    """
    if signed:
        hint = f"the credentials of {SECRET_FIELD} ({secret_holds}) may not write there: check their rights and their expiry"
    else:
        hint = f"name a Secret with {secret_holds} in {SECRET_FIELD}"
    return DestinationRefusedError(f"{what}: access is refused{detail}", hint)


def target_not_found(what: str, detail: str, kind: str) -> DestinationRefusedError:
    """Return the error for HTTP status 404."""
    return DestinationRefusedError(f"{what}: there is no such {kind}{detail}", f"create it, or correct {DESTINATION_FIELD}")


def out_of_space(what: str, detail: str) -> DestinationRefusedError:
    """Return the error for an exceeded quota or size limit."""
    return DestinationRefusedError(
        f"{what}: there is no room, or a file is larger than the destination accepts{detail}",
        "raise the quota or limit at the destination, or lower spec.merge.maxShardSize; files already there are not sent again",
    )
