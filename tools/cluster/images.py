"""Container images without a registry: writing a one-layer OCI archive, and the node's image store."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.cluster.errors import ClusterError
from tools.cluster.processes import run_command

PROBE_REPOSITORY = "finetune-test.local/probe"
"""Repository of the test cluster's own image, which contains only the program `cluster_go/probe`."""

_IMPORTING = "finetune-test.local/importing"
"""Repository of an image after its import, until it gets its name."""

_OCI = "application/vnd.oci.image"


def probe_image_name(probe: Path) -> str:
    """Return the name of the image with this build of the probe."""
    return f"{PROBE_REPOSITORY}:{hashlib.sha256(probe.read_bytes()).hexdigest()[:12]}"


def write_program_image(archive: Path, program: Path, command: Sequence[str], names: Sequence[str] = ()) -> None:
    """Write an OCI archive of an image with one static program at the root, and links to it in /bin.

    Args:
        archive: file to write.
        program: executable that needs no other file.
        command: arguments of the program when the pod gives none.
        names: names of the links, for a program whose behaviour depends on the name by which it is called.
    """
    layer = _layer_of(program, names)
    blobs: dict[str, bytes] = {}

    def add(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": add(json.dumps(config).encode(), f"{_OCI}.config.v1+json"),
        "layers": [add(gzip.compress(layer, 1, mtime=0), f"{_OCI}.layer.v1.tar+gzip")],
    }
    index = {"schemaVersion": 2, "manifests": [add(json.dumps(manifest).encode(), f"{_OCI}.manifest.v1+json")]}
    with tarfile.open(archive, "w") as tar:
        _add_file(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add_file(tar, "index.json", json.dumps(index).encode())
        for digest, data in blobs.items():
            _add_file(tar, f"blobs/sha256/{digest}", data)


def _layer_of(program: Path, names: Sequence[str]) -> bytes:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _add_file(tar, program.name, program.read_bytes(), mode=0o755)
        for name in names:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, f"/{program.name}"
            tar.addfile(link)
    return layer.getvalue()


def _add_file(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)  # its owner is root and its time 1970, so the same content always gives the same bytes
    entry.size = len(data)
    entry.mode = mode
    tar.addfile(entry, io.BytesIO(data))


class ImageStore:
    """The images of the node's container runtime, in the namespace that the kubelet uses."""

    def __init__(self, socket: Path) -> None:
        self._ctr = ("ctr", "--address", str(socket), "--namespace", "k8s.io")

    def names(self) -> set[str]:
        """Return the names of all images."""
        return {name for name in self._digests() if not _is_identifier(name)}

    def load(self, archive: Path, name: str) -> None:
        """Import an OCI archive under `name`, whatever its own name is, unless an image with that name exists.

        Removes the repository's other tags with their content, which frees their disk space.

        Raises:
            ClusterError: the archive cannot be read, or does not hold exactly one image.
        """
        if name not in self.names():
            self._import(archive, name)
        repository = name.rpartition(":")[0]
        self._remove({other for other in self.names() - {name} if other.startswith(f"{repository}:")})

    def _import(self, archive: Path, name: str) -> None:
        self._remove(self._importing())  # a killed run may have left some
        run_command(*self._ctr, "images", "import", "--digests", "--base-name", _IMPORTING, archive)
        imported = self._importing()  # by digest, and by tag when the archive gives one
        digests = self._digests()
        if len({digests[reference] for reference in imported}) != 1:
            raise ClusterError(f"{archive} must hold exactly one image for this machine, found {sorted(imported)}")
        run_command(*self._ctr, "images", "tag", min(imported), name)
        self._remove(imported)

    def _importing(self) -> set[str]:
        return {name for name in self.names() if name.startswith((f"{_IMPORTING}:", f"{_IMPORTING}@"))}

    def _remove(self, names: set[str]) -> None:
        """Remove images by name, and also by the identifiers that the kubelet knows if no name is left."""
        if not names:
            return
        run_command(*self._ctr, "images", "rm", *sorted(names))
        digests = self._digests()
        named = {digest for name, digest in digests.items() if not _is_identifier(name)}
        unnamed = [name for name, digest in digests.items() if _is_identifier(name) and digest not in named]
        if unnamed:
            run_command(*self._ctr, "images", "rm", "--sync", *unnamed)

    def _digests(self) -> dict[str, str]:
        """Return each image's manifest digest by name, or by identifier."""
        _, *lines = run_command(*self._ctr, "images", "ls").splitlines()
        rows = [line.split() for line in lines]  # name, media type, digest, size, platforms, labels
        return {row[0]: row[2] for row in rows}

    def tag(self, name: str, other: str) -> None:
        """Give an image an additional name."""
        run_command(*self._ctr, "images", "tag", name, other)

    def forget(self, registry: str) -> None:
        """Remove the images that were pulled from a registry (`host:port`)."""
        self._remove({name for name in self.names() if name.startswith(f"{registry}/")})

    def untag(self, name: str) -> None:
        """Remove a name, if it exists, from an image that has others."""
        if name in self.names():
            run_command(*self._ctr, "images", "rm", name)

    def blobs(self) -> set[str]:
        """Return the digests of all stored content, which an archive may leave out."""
        return set(run_command(*self._ctr, "content", "ls", "--quiet").split())

    def main_process(self, container: str) -> int:
        """Return the PID, inside the node, of a running container's first process.

        Raises:
            ClusterError: the container does not run.
        """
        for line in run_command(*self._ctr, "tasks", "ls").splitlines():
            fields = line.split()
            if fields and fields[0] == container:
                return int(fields[1])
        raise ClusterError(f"container {container} does not run")

    def remove_containers(self) -> None:
        """Remove all containers, none of which may be running, with their writable layers."""
        containers = run_command(*self._ctr, "containers", "ls", "--quiet").split()
        if containers:
            run_command(*self._ctr, "containers", "rm", *containers)


def _is_identifier(name: str) -> bool:
    """Whether this is the image's identifier, which the container runtime adds to the names of each image."""
    return name.startswith("sha256:")
