"""Exports images from buildah's storage as an OCI archive, without the layers that the reader already has.

`buildah push` writes a layer of six gigabytes twice and compresses it, and does so again after each change of the
small layer above it. The storage keeps each layer's files and, separately, the rest of its tar stream (the format of
github.com/vbatts/tar-split). From both, the layer's exact bytes are restored by reading each file once.
"""

import base64
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tools.images.programs import ImageError

_TAR_BLOCK = 512
_TAR_SPLIT_FILE, _TAR_SPLIT_SEGMENT = 1, 2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class _Blob:
    digest: str
    """`sha256:` and 64 hexadecimal digits."""
    size: int
    """Size in bytes."""


@dataclass(frozen=True)
class StoredImage:
    """An image in a storage directory: its manifest, its configuration and its layers, lowest first."""

    root: Path
    manifest: bytes
    config: bytes
    layers: tuple[_Blob, ...]

    @property
    def size(self) -> int:
        """Uncompressed size of all layers, in bytes."""
        return sum(layer.size for layer in self.layers)


def find_image(root: Path, reference: str) -> StoredImage | None:
    """Return the image with the name `reference` (`localhost/name:tag`) in the storage at `root`, or None.

    Raises:
        ImageError: the image's manifest has compressed layers, which buildah does not create by default.
    """
    index = root / "overlay-images" / "images.json"
    if not index.exists():
        return None
    for record in json.loads(index.read_bytes()):
        if reference in record.get("names", ()):
            return _read_image(root, record)
    return None


def _read_image(root: Path, record: dict[str, Any]) -> StoredImage:
    directory = root / "overlay-images" / record["id"]
    manifest = (directory / "manifest").read_bytes()
    parsed = json.loads(manifest)
    config_name = parsed["config"]["digest"]
    # The storage encodes names with special characters.
    config = (directory / ("=" + base64.b64encode(config_name.encode()).decode())).read_bytes()
    for layer in parsed["layers"]:
        if not layer["mediaType"].endswith(".tar"):
            raise ImageError(f"layer {layer['digest']} has the type {layer['mediaType']}: only plain tar can be read")
    layers = tuple(_Blob(layer["digest"], layer["size"]) for layer in parsed["layers"])
    return StoredImage(root, manifest, config, layers)


def write_archive(image: StoredImage, output: BinaryIO, present: Collection[str] = ()) -> None:
    """Write `image` to `output` as an uncompressed OCI archive without an image name.

    Args:
        image: The image to write.
        output: An object whose only method that is used is `write`.
        present: Digests of blobs that are left out because the reader has them.

    Raises:
        ImageError: a layer in the storage does not match its digest.
    """
    manifest_digest = "sha256:" + hashlib.sha256(image.manifest).hexdigest()
    index = {
        "schemaVersion": 2,
        "manifests": [
            {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": manifest_digest, "size": len(image.manifest)}
        ],
    }
    _write_entry(output, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    _write_entry(output, "index.json", json.dumps(index).encode())
    for content in (image.manifest, image.config):
        _write_entry(output, f"blobs/sha256/{hashlib.sha256(content).hexdigest()}", content)
    identifiers = _layer_identifiers(image.root)
    for layer in image.layers:
        if layer.digest not in present:
            output.write(_header(f"blobs/{layer.digest.replace(':', '/')}", layer.size))
            _copy_layer(image.root, identifiers[layer.digest], layer, output)
            output.write(bytes(-layer.size % _TAR_BLOCK))
    output.write(bytes(2 * _TAR_BLOCK))


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def _write_entry(output: BinaryIO, name: str, content: bytes) -> None:
    output.write(_header(name, len(content)) + content + bytes(-len(content) % _TAR_BLOCK))


def _layer_identifiers(root: Path) -> dict[str, str]:
    """Return the digest of each layer's tar stream -> the layer's name in the storage."""
    records = json.loads((root / "overlay-layers" / "layers.json").read_bytes())
    return {record["diff-digest"]: record["id"] for record in records if "diff-digest" in record}


class _HashingWriter:
    """Passes bytes on, and computes their digest and number."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._digest = hashlib.sha256()
        self.written = 0

    def write(self, data: bytes) -> None:
        self._output.write(data)
        self._digest.update(data)
        self.written += len(data)

    @property
    def digest(self) -> str:
        return "sha256:" + self._digest.hexdigest()


def _copy_layer(root: Path, identifier: str, layer: _Blob, output: BinaryIO) -> None:
    files = root / "overlay" / identifier / "diff"
    stream = _HashingWriter(output)
    with gzip.open(root / "overlay-layers" / f"{identifier}.tar-split.gz") as rest:
        for line in io.BufferedReader(rest):
            entry = json.loads(line)
            if entry["type"] == _TAR_SPLIT_SEGMENT:
                stream.write(base64.b64decode(entry["payload"]))
            elif entry["type"] == _TAR_SPLIT_FILE and entry.get("size"):
                with (files / _file_name(entry)).open("rb", buffering=0) as file:
                    shutil.copyfileobj(file, stream, _COPY_BYTES)
    if (stream.digest, stream.written) != (layer.digest, layer.size):
        raise ImageError(
            f"layer {layer.digest} ({layer.size} bytes) in {root} reads as {stream.digest} ({stream.written} bytes): "
            f"delete {root} and build again"
        )


def _file_name(entry: dict[str, Any]) -> str:
    # A name that is not UTF-8 is in another field.
    raw = entry.get("name_raw")
    name: str = entry["name"] if raw is None else os.fsdecode(base64.b64decode(raw))
    return name.lstrip("/")
