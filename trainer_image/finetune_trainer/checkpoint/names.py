"""Names inside the checkpoint directory.

step-0000000100/             complete by its name alone
    rank-00000.safetensors   one per rank
    manifest.json            written last
step-0000000200.tmp-<uuid>/  being written, or left by a killed run
latest                       name of the newest complete checkpoint, for people; loading scans instead
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LATEST = "latest"
_STEP = re.compile(r"step-(\d{10})")


def directory_name(step: int) -> str:
    """Name of the checkpoint of a step; names sort like steps."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """The step in a directory's name, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """Key inside a rank's file."""
    return f"{kind}/{name}"
