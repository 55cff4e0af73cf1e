"""Builds images with buildah, without a daemon or a registry, in a separate storage directory."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.images.base import EPOCH
from tools.images.programs import run
from tools.images.sources import REPOSITORY, Sources

_TIMES = ("--timestamp", str(EPOCH))


@dataclass(frozen=True)
class Storage:
    """A directory with the layers of one image, of its earlier tags and of its base."""

    directory: Path

    @property
    def root(self) -> Path:
        """Directory of buildah's images; `store.py` reads it."""
        return self.directory / "storage"

    @property
    def mounts(self) -> Path:
        """Directory of buildah's list of mounts, which must not survive a reboot."""
        return Path("/run/finetune-images") / hashlib.sha256(str(self.directory).encode()).hexdigest()[:16]

    def _buildah(self, *arguments: str | Path, text: str | None = None) -> str:
        scratch = self.directory / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        return run(
            *("buildah", "--storage-driver", "overlay", "--root", self.root, "--runroot", self.mounts),
            *arguments,
            environment={"TMPDIR": str(scratch), "BUILDAH_ISOLATION": "chroot"},
            text=text,
        )

    def clear_interrupted(self) -> None:
        """Remove what a killed build has left."""
        self._buildah("umount", "--all")
        self._buildah("rm", "--all")
        shutil.rmtree(self.directory / "scratch")

    def import_file_system(self, kind: str, archive: Path) -> None:
        """Import the tar file of a file system as a base image. kind: a key of KINDS."""
        if self._buildah("images", "--quiet", "--filter", f"reference={imported(kind)}"):
            return
        with archive.open("rb") as file:
            # The digest is written before the import, so that no image exists without it.
            self._digest_file(kind).write_text(hashlib.file_digest(file, "sha256").hexdigest())
        recipe = f"FROM scratch\nADD {archive.name} /\n"
        self._buildah("build", "--quiet", *_TIMES, "--file", "-", "--tag", imported(kind), archive.parent, text=recipe)

    def file_systems(self, sources: Sources) -> dict[str, str]:
        """Kind of base image -> SHA-256 of the file system that was imported, as 64 hexadecimal digits."""
        return {kind: self._digest_file(kind).read_text() for kind in sources.kinds}

    def _digest_file(self, kind: str) -> Path:
        return self.directory / f"{kind}.sha256"

    def build(self, sources: Sources, wheels: Path) -> None:
        """Build the image from its Containerfile. Steps whose input is unchanged are not repeated.

        The result has a temporary name until `accept`. The name also keeps the cached steps: removing the last name of an
        image removes the unnamed images that it was built from.
        """
        self._build(sources, wheels, "--layers", "--tag", _built(sources))

    def rebuild(self, sources: Sources, wheels: Path, reference: str) -> None:
        """Repeat every step of the build, and name the result `reference`."""
        self._build(sources, wheels, "--no-cache", "--layers", "--tag", reference)

    def _build(self, sources: Sources, wheels: Path, *options: str) -> None:
        self._buildah(
            *("build", "--quiet", "--pull-never", "--file", sources.containerfile, *_TIMES),
            *("--ignorefile", sources.ignorefile, "--build-context", f"wheelhouse={wheels}"),
            *(f"--build-arg={kind.upper()}_IMAGE={imported(kind)}" for kind in sources.kinds),
            *options,
            REPOSITORY,
        )

    def derive(self, recipe: str, reference: str, context: Path, shared: Iterable[Path] = ()) -> None:
        """Build an image from the text of a Containerfile, on images of this storage, and name it `reference`.

        Args:
            context: The directory from which COPY copies.
            shared: Files of this machine that RUN sees at the same path, and that the image does not contain.
        """
        volumes = [f"--volume={path}:{path}:ro" for path in shared]
        self._buildah("build", "--quiet", "--pull-never", *volumes, "--file", "-", "--tag", reference, context, text=recipe)

    def tag(self, reference: str, name: str) -> None:
        """Give an image an additional name, which `remove` removes."""
        self._buildah("tag", reference, name)

    def remove(self, reference: str) -> None:
        """Remove an image's name and, if it was the last one, its own layers."""
        self._buildah("rmi", reference)

    def accept(self, sources: Sources, tag: str, keep: int) -> None:
        """Tag the image that was built last, and remove all but the newest `keep` tags.

        The order of the tags is kept in a file, because all images have the same creation time, so that equal sources
        give equal bytes.
        """
        self._buildah("tag", _built(sources), f"localhost/{sources.name}:{tag}")
        earlier = self._accepted.read_text().split() if self._accepted.exists() else []
        kept = [tag, *(other for other in earlier if other != tag)][:keep]
        self._accepted.write_text("\n".join(kept))
        listed = self._buildah("images", "--noheading", "--format", "{{.Name}}:{{.Tag}}")
        wanted = {_built(sources), *(f"localhost/{sources.name}:{kept_tag}" for kept_tag in kept)}
        older = [name for name in listed.split() if name.startswith(f"localhost/{sources.name}:") and name not in wanted]
        if older:
            self._buildah("rmi", *older)

    @property
    def _accepted(self) -> Path:
        """File with the kept tags, newest first."""
        return self.directory / "tags"

    def push(self, reference: str, destination: str, *, plain_http: bool) -> str:
        """Push an image to `registry/repository:tag`, with the logins of `docker login`. Returns its digest."""
        digest = self.directory / "scratch" / "digest"
        self._buildah(
            "push",
            "--quiet",
            f"--tls-verify={str(not plain_http).lower()}",
            "--digestfile",
            digest,
            reference,
            f"docker://{destination}",
        )
        return digest.read_text().strip()

    @contextmanager
    def mounted(self, reference: str) -> Iterator[Path]:
        """Mount a temporary copy of an image's file system and give its root."""
        container = self._buildah("from", "--pull-never", reference).strip()
        try:
            yield Path(self._buildah("mount", container).strip())
        finally:
            self._buildah("rm", container)


def imported(kind: str) -> str:
    """Name of the base image of a kind."""
    return f"localhost/finetune-{kind}:latest"


def _built(sources: Sources) -> str:
    return f"localhost/{sources.name}:built"
