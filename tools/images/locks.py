"""The images' lists of packages and hashes, derived from uv.lock. `python -m tools.images.locks` writes them."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.images.programs import ImageError, run
from tools.images.sources import BILL_OF_MATERIALS, REPOSITORY, SOURCES

_HEADER = "# From uv.lock, by 'python -m tools.images.locks'. Do not edit.\n"

_FORBIDDEN = frozenset({"kernels"})
"""Packages that no image may contain: libraries that find `kernels` download native code from a hub at run time."""

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


@dataclass(frozen=True)
class Lock:
    """A lock file, and the part of uv.lock that it contains."""

    path: Path
    subject: str
    """What the lock is used for, for messages."""
    selection: tuple[str, ...]
    """Arguments of `uv export`."""


LOCKS = (
    *(Lock(image.requirements, image.name, ("--no-dev", "--extra", image.extra)) for image in SOURCES.values()),
    Lock(BILL_OF_MATERIALS, "the bill of materials", ("--only-group", "sbom")),
)


def derive(lock: Lock) -> str:
    """Return the text of a lock according to the current uv.lock.

    Raises:
        ImageError: uv is not installed or failed, or uv.lock contains a package that no image may contain.
    """
    exported = run(
        *(sys.executable, "-m", "uv", "export", "--quiet", "--project", REPOSITORY, "--frozen", "--no-emit-project"),
        *("--no-header", "--no-annotate", *lock.selection),
    )
    forbidden = sorted(_FORBIDDEN & pinned_versions(exported).keys())
    if forbidden:
        raise ImageError(f"uv.lock adds {', '.join(forbidden)} to {lock.subject}: remove the package that depends on it")
    return _HEADER + exported


def pinned_versions(lock: str) -> dict[str, str]:
    """Name -> version of every package in the text of a lock."""
    return dict(_PINNED.findall(lock))


def stale() -> list[Lock]:
    """Return the locks that do not match uv.lock."""
    return [lock for lock in LOCKS if not lock.path.exists() or lock.path.read_text(encoding="utf-8") != derive(lock)]


def main() -> None:
    """Write the locks."""
    for lock in LOCKS:
        lock.path.write_text(derive(lock), encoding="utf-8")


if __name__ == "__main__":
    main()
