"""What the publish role asks of every kind of destination, and how a destination refuses, in words that name the field to fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from finetune_trainer.errors import DestinationRefusedError, DestinationUnavailableError
from finetune_trainer.release.files import Release

DESTINATION_FIELD = "spec.output.destination"
SECRET_FIELD = "spec.output.secretRef"  # noqa: S105 - the name of a field


@dataclass(frozen=True)
class Publication:
    """A release that is where it belongs."""

    address: str
    """With the commit or digest that names this very content, such as `oci://host/name:tag@sha256:...`."""
    digest: str
    """Commit, manifest digest, or SHA-256 of the manifest."""
    bytes_sent: int
    """In this attempt: what was there already was not sent again."""


class Destination(Protocol):
    """A place outside the cluster. Readers see nothing, or what was there before, until everything is there."""

    def publish(self, release: Release) -> Publication:
        """Bring the release; may be killed and called again at any point, and then sends only what is missing.

        Raises DestinationRefusedError if a human has to act (credentials, names, something else that is there already) and
        DestinationUnavailableError if trying again may help.
        """


def destination_unavailable(message: str) -> DestinationUnavailableError:
    """Requests fail again and again."""
    return DestinationUnavailableError(
        message,
        "what is there is not sent again; check the way out of the cluster and the endpoints of the profile's spec.publish",
    )


def access_denied(what: str, said: str, *, signed: bool, secret_holds: str) -> DestinationRefusedError:
    """401 or 403.

    signed: whether there were credentials. secret_holds: what belongs into the Secret or, locally, elsewhere.
    """
    if signed:
        hint = f"the credentials of {SECRET_FIELD} ({secret_holds}) may not write there: check their rights and their expiry"
    else:
        hint = f"name a Secret with {secret_holds} in {SECRET_FIELD}"
    return DestinationRefusedError(f"{what}: access is refused{said}", hint)


def target_not_found(what: str, said: str, thing: str) -> DestinationRefusedError:
    """404."""
    return DestinationRefusedError(f"{what}: there is no such {thing}{said}", f"make it, or correct {DESTINATION_FIELD}")


def out_of_space(what: str, said: str) -> DestinationRefusedError:
    """A quota or a limit of size."""
    return DestinationRefusedError(
        f"{what}: there is no room, or a file is larger than the destination takes{said}",
        "raise the quota or the limit there, or lower spec.merge.maxShardSize; what is there is not sent again",
    )
