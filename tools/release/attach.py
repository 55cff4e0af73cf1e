"""Stores signatures and attestations in the repository of their image or chart, under the tags where cosign looks for them."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_job.api.base import RegistryPath, parse_destination
from finetune_trainer.credentials import Credentials
from finetune_trainer.network.http_status import NOT_FOUND
from finetune_trainer.publish.http import HttpClient
from finetune_trainer.publish.registry import Registry

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True)
class Layer:
    """One signature or attestation."""

    content: bytes
    media_type: str
    annotations: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def repository(reference: str, *, plain_http: bool) -> Iterator[Registry]:
    """Open a repository (`registry.example/team/name`) with the login that `docker login` stored for its registry."""
    place = parse_destination(f"oci://{reference}")
    assert isinstance(place, RegistryPath)
    client = HttpClient(threading.Event())
    try:
        # There is no directory of mounted credentials, because this is not a pod.
        login = Credentials(Path("/nonexistent")).registry_login(place.registry)
        yield Registry(client, place, login, plain_http=plain_http)
    finally:
        client.close()


def digest_of_tag(registry: Registry, tag: str) -> str:
    """Return the digest of the manifest with this tag. Raises DestinationRefusedError, TransientError."""
    what = f"reading manifest {tag}"
    answer = registry.send("GET", registry.url(f"manifests/{tag}"), {"Accept": MANIFEST_TYPE}, what=what)
    return _digest(registry.check(answer, what).content)


def attach(registry: Registry, digest: str, suffix: str, layers: Sequence[Layer]) -> None:
    """Add layers to the signatures (`sig`) or attestations (`att`) of a manifest; existing layers stay.

    Raises DestinationRefusedError, TransientError.
    """
    tag = f"{digest.replace(':', '-')}.{suffix}"
    what = f"reading manifest {tag}"
    answer = registry.send("GET", registry.url(f"manifests/{tag}"), {"Accept": MANIFEST_TYPE}, what=what)
    existing = [] if answer.status == NOT_FOUND else json.loads(registry.check(answer, what).content)["layers"]
    descriptors = [*existing, *(_upload(registry, layer.content, layer.media_type, layer.annotations) for layer in layers)]
    config = {
        "architecture": "",
        "os": "",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [descriptor["digest"] for descriptor in descriptors]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _upload(registry, _encode(config), _CONFIG_TYPE),
        "layers": descriptors,
    }
    what = f"writing manifest {tag}"
    url, headers = registry.url(f"manifests/{tag}"), {"Content-Type": MANIFEST_TYPE}
    registry.check(registry.send("PUT", url, headers, _encode(manifest), what=what), what)


def _upload(registry: Registry, content: bytes, media_type: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Upload a blob. Returns its descriptor."""
    digest = _digest(content)
    what = f"writing blob {digest}"
    begun = registry.check(registry.send("POST", registry.url("blobs/uploads/"), what=what), what)
    location = registry.location(begun)
    url = f"{location}{'&' if '?' in location else '?'}digest={digest}"
    registry.check(registry.send("PUT", url, {"Content-Type": "application/octet-stream"}, content, what=what), what)
    described = {"mediaType": media_type, "digest": digest, "size": len(content)}
    return described | ({"annotations": dict(annotations)} if annotations else {})


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
