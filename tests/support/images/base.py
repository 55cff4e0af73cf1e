"""The base image of the tests, made from Debian packages because no registry can be asked."""

import hashlib
import tempfile
from pathlib import Path

from tests.support.images.programs import run, timed

_MIRROR = "http://deb.debian.org/debian"
_SUITE = "bookworm"
_PACKAGES = ("python3.11-minimal", "libpython3.11-stdlib", "tini", "ca-certificates")
_UNWANTED = (
    *("./dev/*", "./proc/*", "./sys/*", "./etc/resolv.conf", "./etc/hostname"),
    *("./var/cache/apt/*", "./var/lib/apt/lists/*"),
)
"""Left out: what belongs to the machine that made it, and what the package manager downloaded."""


def base_hash() -> str:
    """Changes with the way in which the base image is made."""
    return hashlib.sha256("\0".join((_MIRROR, _SUITE, *_PACKAGES, *_UNWANTED)).encode()).hexdigest()[:16]


def base_archive(directory: Path) -> Path:
    """Return the tar file of the base image's file system in `directory`, made there if it is missing (needs root).

    Raises:
        ImageError: debootstrap is not installed, or failed.
    """
    archive = directory / f"base-{base_hash()}.tar"
    if archive.exists():
        return archive
    for older in directory.glob("base-*.tar"):
        older.unlink()
    with tempfile.TemporaryDirectory(dir=directory, prefix="making-base-") as scratch, timed("base image: debootstrap"):
        root, written = Path(scratch) / "root", Path(scratch) / "base.tar"
        run("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, root, _MIRROR)
        unwanted = [f"--exclude={pattern}" for pattern in _UNWANTED]
        run("tar", "-C", root, "--numeric-owner", *unwanted, "-cf", written, ".")
        written.rename(archive)
    return archive
