"""Shows what a power cut would leave of files that this process writes: syncs, renames and removals are recorded and judged.

The disk is the worst that the standard allows: content is safe once its file was synced, a name once its directory was synced,
and what a failed sync was for is lost, whatever a later sync says. Contents are read when they are synced and when they are
renamed, so it does not matter who wrote them, Python or a library. Nothing is really synced.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.files import TEMPORARY_MARK

Content = bytes | dict[str, int]
"""Bytes of a file, or the names in a directory with their inodes."""
Claims = Callable[[Path], Iterable[tuple[Path, int, str]]]
"""Returns what a journal calls durable: files, the number of their first bytes, and the SHA-256 of these."""
_RANDOM = re.compile(r"(?<=\.tmp-)[0-9a-f]{32}")


@dataclass(frozen=True)
class Sync:
    """The `number`-th sync (from 1) of what has this name below the root; random names are `*`."""

    name: str
    number: int


class PowerCuts:
    """A record of everything below `root`, as long as `patch` lasts.

    failing: the sync that raises EIO. claims: what a journal says of other files when it is synced.
    """

    def __init__(
        self, root: Path, patch: pytest.MonkeyPatch, failing: Sync | None = None, claims: Claims = lambda _path: ()
    ) -> None:
        self.root, self.failing, self.has_failed = root, failing, False
        self.syncs: list[Sync] = []
        self.removed: list[Path] = []
        self.problems: list[str] = []
        self._claims = claims
        self._named: list[Path] = []
        self._lost: set[int] = set()
        self._durable = {path.stat().st_ino: content(path) for path in (root, *root.rglob("*"))}
        patch.setattr(os, "fsync", self._sync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, partial(self._renamed, getattr(os, name)))
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, partial(self._removed, getattr(os, name)))

    def losses(self) -> list[str]:
        """Return what a power cut would now lose of files with a final name."""
        files = [path for path in self.root.rglob("*") if path.is_file() and not is_temporary(path, self.root)]
        named = [path for path in {*files, *self._named} if path.exists()]
        return sorted(
            [f"the content of {path}" for path in files if not self._is_durable(path)]
            + [f"the name {path}" for path in named if not self._has_durable_name(path)]
        )

    def _sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self.root) or not path.exists():
            return
        name = _RANDOM.sub("*", str(path.relative_to(self.root)))
        made = Sync(name, 1 + sum(sync.name == name for sync in self.syncs))
        self.syncs.append(made)
        number = os.fstat(descriptor).st_ino
        if made == self.failing:
            self.has_failed = True
            self._lost.add(number)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if number not in self._lost:
            self._durable[number] = content(path)
        for other, num_bytes, sha256 in self._claims(path):
            known = self._durable.get(other.stat().st_ino)
            if not isinstance(known, bytes) or hashlib.sha256(known[:num_bytes]).hexdigest() != sha256:
                self.problems.append(f"{path.name} calls {num_bytes} bytes of {other.name} durable, and they are not")

    def _renamed(self, rename: Callable[[Path, Path], None], *paths: Any) -> None:
        source, target = map(Path, paths)
        if target.is_relative_to(self.root) and not is_temporary(target, self.root):
            unsafe = [path for path in (source, *source.rglob("*")) if not self._is_durable(path)]
            self.problems += [f"{path} is not durable when {source.name} becomes {target.name}" for path in unsafe]
            self._named.append(target)
        self._forget(target)
        rename(source, target)

    def _removed(self, remove: Callable[..., None], path: Any, *, dir_fd: int | None = None) -> None:
        parent = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        if (whole := parent / os.fspath(path)).is_relative_to(self.root) and os.path.lexists(whole):
            self.removed.append(whole)
            self._forget(whole)
        remove(path, dir_fd=dir_fd)

    def _forget(self, path: Path) -> None:
        """Its inode's number may be given to another file."""
        if os.path.lexists(path):
            self._durable.pop(path.lstat().st_ino, None)
            self._lost.discard(path.lstat().st_ino)

    def _is_durable(self, path: Path) -> bool:
        return self._durable.get(path.stat().st_ino) == content(path)

    def _has_durable_name(self, path: Path) -> bool:
        names = self._durable.get(path.parent.stat().st_ino)
        return isinstance(names, dict) and names.get(path.name) == path.stat().st_ino


def content(path: Path) -> Content:
    """Bytes of a file, or names of a directory."""
    return {each.name: each.lstat().st_ino for each in path.iterdir()} if path.is_dir() else path.read_bytes()


def is_temporary(path: Path, root: Path) -> bool:
    """Whether it, or a directory that it is in, is marked as not complete."""
    return TEMPORARY_MARK in str(path.relative_to(root))
