"""Checks that a job's directories are writable, have room, and hold no results of other jobs. Leaves nothing behind.

This module has few imports, because the command line uses it before anything heavy is imported (roles/look.py).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from finetune_job.api.base import ClaimPath
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding


def not_writable(field: str, location: ClaimPath, claims_root: Path) -> Finding | None:
    """Reports a directory that is not writable. Writes and removes a file there, or in the nearest parent that exists."""
    claim = claims_root / location.claim
    address = f"pvc://{location.claim}/{location.path}"
    if not claim.is_dir():
        return make_finding(
            "claim-not-mounted",
            field=field,
            value=address,
            message=f"the claim {location.claim} is not mounted at {claim}",
            fix="name a claim of the job's namespace",
        )
    directory = _nearest_existing(claim / location.path)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".write-probe-") as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return make_finding(
            "directory-not-writable",
            field=field,
            value=address,
            message=f"user {os.getuid()}, group {os.getgid()} cannot write to {directory} ({error.strerror})",
            fix="let that user or group write there (on a cluster: the profile's fsGroup), or name a claim that is not read-only",
        )
    return None


def no_room(field: str, location: ClaimPath, claims_root: Path, needed_bytes: int, what: str) -> Finding | None:
    """Reports a claim that has less than `needed_bytes` free."""
    statistics = os.statvfs(_nearest_existing(claims_root / location.claim / location.path))
    free_bytes = statistics.f_bavail * statistics.f_frsize
    if free_bytes >= needed_bytes:
        return None
    return make_finding(
        "claim-too-small",
        field=field,
        value=f"pvc://{location.claim}/{location.path}",
        message=f"{what} need {_shown(needed_bytes)}, but the claim has {_shown(free_bytes)} free",
        fix="enlarge the claim, or make room on it",
    )


def not_vacant(field: str, location: ClaimPath, results: Iterable[Path]) -> Finding | None:
    """Reports existing `results`, since results of another job are never overwritten."""
    taken = [path.name for path in results if path.exists()]
    if not taken:
        return None
    return make_finding(
        "output-exists",
        field=field,
        value=f"pvc://{location.claim}/{location.path}",
        message=f"the directory holds {' and '.join(taken)} already, which are the results of another job",
        fix="choose another destination, or move the old results away",
    )


def _nearest_existing(path: Path) -> Path:
    return path if path.exists() else _nearest_existing(path.parent)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
