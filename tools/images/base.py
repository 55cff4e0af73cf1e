"""The base images of all builds, made from Debian packages because no registry is available.

One is the base of the final image. The other has a compiler, and is used only in an earlier stage of the build.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from tools.images.programs import run, timed

SNAPSHOT_VARIABLE = "DEBIAN_SNAPSHOT"
"""Environment variable with a time of Debian's archive (20261101T000000Z). Unset: the mirrors' current packages."""

_MIRRORS, _ARCHIVE = "http://deb.debian.org", "http://snapshot.debian.org/archive"
_SUITE = "bookworm"
_REPOSITORIES = (("debian", _SUITE), ("debian", f"{_SUITE}-updates"), ("debian-security", f"{_SUITE}-security"))
_PACKAGES = ("python3.11-minimal", "libpython3.11-stdlib", "tini", "ca-certificates", "libstdc++6")
KINDS = {"base": _PACKAGES, "compiler": (*_PACKAGES, "gcc", "libc6-dev", "libpython3.11-dev")}
"""Kind of base image -> its packages."""
_OPTIONS = ("--quiet", "--variant=essential")
EPOCH = 0
"""Time of every file and image, in seconds since 1970, so that the same input gives the same bytes."""


def package_sources(snapshot: str | None) -> str:
    """Return the sources.list of the base image, including security updates. A snapshot never changes.

    Args:
        snapshot: A time in the form of Debian's snapshot archive, or None for the mirrors' current packages.
    """
    options = "" if snapshot is None else "[check-valid-until=no] "
    host, point = (_MIRRORS, "") if snapshot is None else (_ARCHIVE, f"/{snapshot}")
    return "".join(f"deb {options}{host}/{repository}{point} {suite} main\n" for repository, suite in _REPOSITORIES)


def chosen_sources() -> str:
    return package_sources(os.environ.get(SNAPSHOT_VARIABLE) or None)


def base_hash(kind: str = "base") -> str:
    """Hash of the way in which a base image is made. kind: a key of KINDS."""
    return hashlib.sha256("\0".join((chosen_sources(), *_options(kind), str(EPOCH))).encode()).hexdigest()[:16]


def _options(kind: str) -> tuple[str, ...]:
    return (*_OPTIONS, f"--include={','.join(KINDS[kind])}")


def base_archive(directory: Path, kind: str = "base") -> Path:
    """Return the tar file of the image's file system in `directory`. Creates it if it is missing (needs root).

    The same packages give the same bytes.

    Raises:
        ImageError: mmdebstrap is not installed, or failed.
    """
    archive = directory / f"{kind}-{base_hash(kind)}.tar"
    if archive.exists():
        return archive
    for older in directory.glob(f"{kind}-*.tar"):
        older.unlink()
    with tempfile.TemporaryDirectory(dir=directory, prefix=f"making-{kind}-") as scratch, timed(f"{kind} image: mmdebstrap"):
        sources, written = Path(scratch) / "sources.list", Path(scratch) / "base.tar"
        sources.write_text(chosen_sources())
        run("mmdebstrap", *_options(kind), _SUITE, written, sources, environment={"SOURCE_DATE_EPOCH": str(EPOCH)})
        written.rename(archive)
    return archive
