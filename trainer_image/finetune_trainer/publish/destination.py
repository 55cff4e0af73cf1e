"""What the publish role asks of every kind of destination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from finetune_trainer.release.files import Release


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

        Raises DestinationRefusedError where a human has to act (credentials, names, something else that stands there) and
        DestinationUnavailableError where trying again may help.
        """
