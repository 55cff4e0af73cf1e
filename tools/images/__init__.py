"""Builds the product's container images from the Containerfiles of this tree, without a registry or a daemon.

`python -m tools.images` builds both. The results of all slow steps are cached by the hash of their inputs.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.cache import cache_root, locked
from tools.cluster.requirements import ensure_packages
from tools.images.base import base_archive
from tools.images.buildah import Storage
from tools.images.programs import ImageError, timed
from tools.images.sources import SOURCES, Sources
from tools.images.store import StoredImage, find_image, write_archive
from tools.images.wheelhouse import wheelhouse

__all__ = ["Image", "ImageError", "build", "rebuilt_manifest"]

_KEPT = 2
"""Number of sets of dependencies that stay in the cache, and number of tags for each: the newest."""

_ATTEMPTS = 3
"""Maximum number of builds while the tree is being edited: an image must match its tag, which is the hash of its sources."""


@dataclass(frozen=True)
class Image:
    """A built image."""

    name: str
    tag: str
    """Hash of everything that the image is made from."""
    storage: Storage

    @property
    def reference(self) -> str:
        """Full name of the image in the container runtime; in a pod, `name:tag` means the same."""
        return f"docker.io/library/{self.name}:{self.tag}"

    @property
    def stored(self) -> StoredImage:
        """The image's manifest, configuration and layers."""
        stored = find_image(self.storage.root, f"localhost/{self.name}:{self.tag}")
        if stored is None:
            raise ImageError(f"{self.name}:{self.tag} is no longer in {self.storage.root}: build it again")
        return stored

    @contextmanager
    def archive(self, present: Collection[str] = ()) -> Iterator[Path]:
        """Give the path of an OCI archive of the image that can be read once, from start to end.

        The path is a named pipe, so that six gigabytes reach the reader without a copy on disk. The archive contains no
        image name, so the reader sets one: `ctr images import --index-name REFERENCE PATH`.

        Args:
            present: Digests of blobs that are left out because the reader has them (`ctr content ls --quiet`).

        Raises:
            ImageError: the storage is damaged. The reader has then seen an archive that ends early.
        """
        stored = self.stored
        with tempfile.TemporaryDirectory(prefix="image-") as directory, ThreadPoolExecutor(1) as writer:
            pipe = Path(directory) / f"{self.name}.tar"
            os.mkfifo(pipe)
            opened = threading.Event()
            written = writer.submit(_write_pipe, pipe, opened, stored, present)
            try:
                yield pipe
            finally:
                # If no reader has opened the pipe, the writer would wait for one: open it here, so that the writer goes on.
                reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
                opened.wait()
                os.close(reader)
            written.result()

    def push(self, registry: str, *, tag: str | None = None, plain_http: bool = False) -> str:
        """Push the image to `registry/name:tag`; `registry` may contain a path. Returns the digest of its manifest.

        Args:
            tag: Tag in the registry; None for the tag of the sources.
            plain_http: Whether the registry has no TLS.
        """
        target = f"{registry}/{self.name}:{tag or self.tag}"
        return self.storage.push(f"localhost/{self.name}:{self.tag}", target, plain_http=plain_http)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """Mount a temporary copy of the image's file system (needs root) and give its root."""
        with self.storage.mounted(f"localhost/{self.name}:{self.tag}") as root:
            yield root


def _write_pipe(pipe: Path, opened: threading.Event, stored: StoredImage, present: Collection[str]) -> None:
    # A reader that is done or has failed closes the pipe, and reports the error itself.
    with suppress(BrokenPipeError), pipe.open("wb") as output:
        opened.set()
        write_archive(stored, output, present)


def build(which: str) -> Image:
    """Return the image `trainer` or `operator` of the current tree. Builds it if the cache lacks it (needs root).

    Raises:
        ImageError: a program is missing, or a step failed.
    """
    ensure_packages()
    sources = SOURCES[which]
    directory = cache_root() / "images"
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / f"{sources.name}.lock"):
        for _ in range(_ATTEMPTS):
            image = _named(sources, directory)
            if find_image(image.storage.root, f"localhost/{image.name}:{image.tag}") is not None:
                break
            _build(sources, image, directory)
            if image == _named(sources, directory):
                image.storage.accept(sources, image.tag, _KEPT)
                break
        else:
            raise ImageError(f"the files of {sources.name} changed during each of {_ATTEMPTS} builds: build again")
        image.storage.directory.touch()
        _remove_older_storages(directory, sources.name)
    return image


def rebuilt_manifest(which: str) -> bytes:
    """Build the image `trainer` or `operator` again from its base and its wheels, and return its manifest.

    Raises:
        ImageError: a step failed.
    """
    sources, image = SOURCES[which], build(which)
    reference = f"localhost/{sources.name}:rebuilt"
    image.storage.rebuild(sources, wheelhouse(sources, cache_root() / "wheels"), reference)
    try:
        stored = find_image(image.storage.root, reference)
        assert stored is not None
        return stored.manifest
    finally:
        image.storage.remove(reference)


def _named(sources: Sources, directory: Path) -> Image:
    """Return the image of the current tree, which may not be built yet."""
    return Image(sources.name, sources.tag, Storage(directory / f"{sources.name}-{sources.dependencies_hash}"))


def _build(sources: Sources, image: Image, directory: Path) -> None:
    image.storage.clear_interrupted()
    # Base images wait for a mirror and for dpkg, and wheels for the package index.
    with ThreadPoolExecutor() as parallel:
        archives = [parallel.submit(_base, directory, kind) for kind in sources.kinds]
        wheels = parallel.submit(wheelhouse, sources, cache_root() / "wheels")
    with timed(f"{image.name}:{image.tag}: base image into the storage"):
        for kind, archive in zip(sources.kinds, archives, strict=True):
            image.storage.import_file_system(kind, archive.result())
    with timed(f"{image.name}:{image.tag}: build"):
        image.storage.build(sources, wheels.result())


def _base(directory: Path, kind: str) -> Path:
    with locked(directory / f"{kind}.lock"):
        return base_archive(directory, kind)


def _remove_older_storages(directory: Path, name: str) -> None:
    storages = [path for path in directory.glob(f"{name}-*") if path.is_dir()]
    for older in sorted(storages, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT:]:
        shutil.rmtree(older)
