"""The images that those of the tests and of releases are built on, made from Debian packages because no registry can be asked.

One stays as the base; the other has a compiler, and is used in a stage whose other files are left behind.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from tools.images.programs import run, timed

SNAPSHOT_VARIABLE = "DEBIAN_SNAPSHOT"
"""Environment variable: a point in time of Debian's archive (20261101T000000Z). Unset: what the mirrors have today."""

_MIRRORS, _ARCHIVE = "http://deb.debian.org", "http://snapshot.debian.org/archive"
_SUITE = "bookworm"
_REPOSITORIES = (("debian", _SUITE), ("debian", f"{_SUITE}-updates"), ("debian-security", f"{_SUITE}-security"))
_PACKAGES = ("python3.11-minimal", "libpython3.11-stdlib", "tini", "ca-certificates", "libstdc++6")
KINDS = {"base": _PACKAGES, "compiler": (*_PACKAGES, "gcc", "libc6-dev", "libpython3.11-dev")}
"""Packages of each image, by what it is for."""
_OPTIONS = ("--quiet", "--variant=essential")
EPOCH = 0
"""Seconds since 1970: the time of every file and of every image, so that the same input gives the same bytes."""


def package_sources(snapshot: str | None) -> str:
    """The base's lines for apt, with Debian's security updates; those of a snapshot stay what they are.

    Args:
        snapshot: A point in time as Debian's archive of snapshots writes it, or None for what the mirrors have today.
    """
    options = "" if snapshot is None else "[check-valid-until=no] "
    host, point = (_MIRRORS, "") if snapshot is None else (_ARCHIVE, f"/{snapshot}")
    return "".join(f"deb {options}{host}/{repository}{point} {suite} main\n" for repository, suite in _REPOSITORIES)


def chosen_sources() -> str:
    return package_sources(os.environ.get(SNAPSHOT_VARIABLE) or None)


def base_hash(kind: str = "base") -> str:
    """Changes with the way in which the image is made; kind: of KINDS."""
    return hashlib.sha256("\0".join((chosen_sources(), *_options(kind), str(EPOCH))).encode()).hexdigest()[:16]


def _options(kind: str) -> tuple[str, ...]:
    return (*_OPTIONS, f"--include={','.join(KINDS[kind])}")


def base_archive(directory: Path, kind: str = "base") -> Path:
    """Return the tar file of the image's file system in `directory`, made there if it is missing (needs root).

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
