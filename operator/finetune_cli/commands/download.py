"""`finetune download`: copies the results of a job from their claim, and checks each file against SHA256SUMS."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster
from finetune_cli.cluster.reader_pod import workspace_of
from finetune_cli.cluster.results_pod import ResultsPod, running_pod
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.jobs import documents
from finetune_cli.jobs.plain import plain
from finetune_job.layout import OutputLayout

LIST_NAME = OutputLayout(Path()).checksums.name
MOST_BREAKS = 5
"""Number of connections in a row that may break without delivering new bytes of a file before the command gives up."""
_LINE = re.compile(r"(?P<sha256>[0-9a-f]{64})  (?P<name>.+)")
_READ_BYTES = 1 << 20
_PARTIAL = ".part"
"""Suffix of a partially copied file; the next call continues the copy."""


@dataclass(frozen=True)
class Downloaded:
    """The files that were copied."""

    directory: Path
    files: int
    bytes: int
    """Bytes that were sent; files that existed already are not counted."""

    def text(self) -> str:
        """Return the answer as text."""
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        return f"{self.directory}: {files}, checked against {LIST_NAME}; {self.bytes / 1e6:.1f} MB were sent\n"

    def document(self) -> dict[str, Any]:
        """Return the answer as data."""
        return {"directory": str(self.directory), "files": self.files, "bytesSent": self.bytes}


@dataclass(frozen=True)
class Listener:
    """Callbacks through which a copy reports its progress and learns whether the user has stopped it."""

    told: Callable[[str], None]
    """Called with the name and size of each file before the file is copied."""
    stopped: Callable[[], bool]
    """Whether the user has stopped the copy."""


def download(cluster: Cluster, name: str, directory: Path, seconds: int, listener: Listener) -> Downloaded:
    """Copy the results of a job from their claim, within `seconds`. Call it again to continue.

    Raises ClusterError, LocalError.
    """
    job = cluster.job(name)
    access = workspace_of(cluster, job)
    if access.published_at:
        raise LocalError(f"{job.title}: its results are published at {access.published_at}; read them from there")
    with running_pod(cluster, job, access, seconds) as pod:
        return bring(pod, directory, listener)


def bring(source: ResultsPod, directory: Path, listener: Listener) -> Downloaded:
    """Copy all files that SHA256SUMS names, then SHA256SUMS itself. Raises ClusterError, LocalError."""
    listing = source.listing()
    text = listing.get("sums")
    if not isinstance(text, str):
        raise ClusterError(
            f"there is no {LIST_NAME}, which is written last, so the results are not complete; wait for the job", ExitCode.REFUSED
        )
    digests = parse_list(text)
    sizes = {name: size for name, size in documents.part(listing, "sizes").items() if isinstance(size, int)}
    missing = sorted(set(digests) - set(sizes))
    if missing:
        raise ClusterError(f"{plain(missing[0], 200)} is named by {LIST_NAME}, but does not exist")
    sent = 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        needed, free = sum(sizes[name] for name in digests), shutil.disk_usage(directory).free
        if needed > free:
            raise LocalError(f"{directory}: {needed} bytes are needed and {free} are free; name a directory with room")
        for name, sha256 in digests.items():
            listener.told(f"{name} ({sizes[name] / 1e6:.1f} MB)")
            sent += _bring_file(source, name, sha256, directory, listener)
        partial = directory / f"{LIST_NAME}{_PARTIAL}"
        partial.write_text(text)
        partial.replace(directory / LIST_NAME)
    except OSError as error:
        raise LocalError(f"{error.filename or directory} cannot be written ({error.strerror})", ExitCode.FAILED) from error
    return Downloaded(directory, len(digests), sent)


def parse_list(text: str) -> dict[str, str]:
    """Parse SHA256SUMS: map the name of each file to its SHA-256.

    Raises ClusterError for a malformed line, for a name that leads out of the directory, and for a name that collides with
    another file, with the partial copy of one, or with the list itself.
    """
    digests: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        name = match["name"] if match is not None else ""
        path = PurePosixPath(name)
        if match is None or name.startswith("/") or not path.name or ".." in path.parts or not name.isprintable():
            raise ClusterError(f"{LIST_NAME}: {plain(line, 120)!r} names no file of the results; another program has written it")
        digests[name] = match["sha256"]
    # Different names may denote the same path, such as a//b and ./a/b, so paths are counted instead of names.
    written = Counter([PurePosixPath(LIST_NAME), *map(PurePosixPath, digests)])
    parts = {path.with_name(f"{path.name}{_PARTIAL}") for path in written}
    for name in digests:
        path = PurePosixPath(name)
        if path in parts or written[path] > 1:
            raise ClusterError(f"{LIST_NAME}: {plain(name, 120)!r} would replace another file; another program has written it")
    return digests


def _bring_file(source: ResultsPod, name: str, sha256: str, directory: Path, listener: Listener) -> int:
    """Copy a file, and return how many bytes were sent. Raises ClusterError, LocalError, OSError."""
    target = directory / name
    partial = target.with_name(f"{target.name}{_PARTIAL}")
    if target.is_file() and _digest(target).hexdigest() == sha256:
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    sent = breaks = 0
    while True:
        digest = _digest(partial) if partial.is_file() else hashlib.sha256()
        before = sent
        try:
            with partial.open("ab") as file:
                for chunk in source.content(name, file.tell()):
                    if listener.stopped():
                        raise LocalError("interrupted; the same command continues", ExitCode.INTERRUPTED)
                    file.write(chunk)
                    digest.update(chunk)
                    sent += len(chunk)
        except ClusterError as error:
            breaks = 0 if sent > before else breaks + 1
            # An error with a status, such as a missing permission, is not a broken connection, and would occur again.
            if error.status is not None or breaks >= MOST_BREAKS:
                raise
            continue
        if digest.hexdigest() != sha256:
            partial.unlink()
            raise ClusterError(
                f"{name}: the received bytes do not match {LIST_NAME}; run the command again to read the file from its start"
            )
        partial.replace(target)
        return sent


def _digest(path: Path) -> Any:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest
