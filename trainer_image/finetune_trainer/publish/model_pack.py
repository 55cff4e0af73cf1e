"""A release as an OCI artifact that follows the CNCF's ModelPack specification, with one raw layer for each file.

Media types and annotations are from https://github.com/modelpack/model-spec, docs/{spec,config,annotations}.md and
specs-go/v1/mediatype.go at d78bf3231b4f; the manifest from https://github.com/opencontainers/image-spec/blob/v1.1.0/manifest.md.
The artifact contains only the release and names no time or machine, so equal releases have equal digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from finetune_trainer.files import CODE_SUFFIX, LICENCE_NAMES
from finetune_trainer.release.files import BESIDE, CHECKSUMS, SIGNATURE, WEIGHT_SUFFIX, Release

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
WEIGHT_TYPE = "application/vnd.cncf.model.weight.v1.raw"
WEIGHT_CONFIG_TYPE = "application/vnd.cncf.model.weight.config.v1.raw"
DOC_TYPE = "application/vnd.cncf.model.doc.v1.raw"
CODE_TYPE = "application/vnd.cncf.model.code.v1.raw"
FILE_PATH = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"
"""Annotation from which `oras pull` takes a layer's file name; it skips layers without this annotation."""
FACT_PREFIX = "dev.finetune."
"""Prefix of the annotations about a model's origin."""
_DOCS = frozenset({*BESIDE, CHECKSUMS, SIGNATURE})


@dataclass(frozen=True)
class ModelPackArtifact:
    """The parts of the artifact that are pushed in addition to the files."""

    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """Digest of the manifest, which covers the whole content."""
        return digest_of(self.manifest)


def digest_of(content: bytes) -> str:
    """Return the content's digest in the form that registries use."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def media_type(name: str) -> str:
    """Return the media type of the layer for a file with this name."""
    path = PurePosixPath(name)
    if path.suffix == WEIGHT_SUFFIX:
        return WEIGHT_TYPE
    if path.suffix == CODE_SUFFIX:
        return CODE_TYPE
    if name in _DOCS or path.suffix == ".md" or path.name.upper().startswith(LICENCE_NAMES):
        return DOC_TYPE
    return WEIGHT_CONFIG_TYPE


def build_artifact(release: Release) -> ModelPackArtifact:
    """Build the configuration and the manifest, whose last layer is SHA256SUMS."""
    files = (*release.files, release.manifest)
    name = release.facts.get("job", "").rpartition("/")[2]
    config = _json(
        {
            "descriptor": {"name": name} if name else {},
            "config": {"format": "safetensors"},
            "modelfs": {"type": "layers", "diffIds": [f"sha256:{file.sha256}" for file in files]},
        }
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
        "layers": [
            {
                "mediaType": media_type(file.name),
                "digest": f"sha256:{file.sha256}",
                "size": file.size,
                "annotations": {FILE_PATH: file.name, TITLE: file.name},
            }
            for file in files
        ],
        "annotations": {f"{FACT_PREFIX}{name}": value for name, value in release.facts.items()},
    }
    return ModelPackArtifact(config, _json(manifest))


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
