"""The repositories on the Hub into which a release is split.

Loaders take a model from the top of a repository: PEFT's AutoPeftModel also uses the adapter's folder for the base, and vLLM
does not support folders. So the adapter of a merged model gets a repository of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finetune_job.api.base import HubPath, adapter_repository
from finetune_trainer.errors import CheckpointError
from finetune_trainer.release.checksums import checksum_lines
from finetune_trainer.release.files import ADAPTER, CHECKSUMS, PROVENANCE, SIGNATURE, Release, ReleaseFile

_BELOW = f"{ADAPTER}/"


def release_by_repository(release: Release, place: HubPath, scratch: Path) -> tuple[tuple[HubPath, Release], ...]:
    """Return each repository with its release, in the order of publishing: once the last one is published, all are.

    Args:
    release: All files, with names relative to the top of `place`.
    place: The destination.
    scratch: A directory for SHA256SUMS files, to which only this pod can write.

    Raises CheckpointError if two files of a repository would have the same name, and OSError.
    """
    adapter = [replace(file, name=file.name.removeprefix(_BELOW)) for file in release.files if file.name.startswith(_BELOW)]
    if not adapter:
        return ((place, release),)
    rest = [file for file in release.files if not file.name.startswith(_BELOW)]
    about = [file for file in rest if file.name == PROVENANCE]
    ours = {CHECKSUMS, SIGNATURE, *(file.name for file in about)}
    if taken := sorted(ours & {file.name for file in adapter}):
        raise CheckpointError(
            f"{adapter[0].claim}: the adapter's directory has {taken[0]}, which is the name of another file of its repository",
            "find out who writes to the claim; remove that file and run the merge again",
        )
    return (
        (adapter_repository(place), _release(release, [*adapter, *about], scratch / "adapter")),
        (place, _release(release, rest, scratch / "merged")),
    )


def _release(whole: Release, files: Sequence[ReleaseFile], scratch: Path) -> Release:
    content = checksum_lines({file.name: file.sha256 for file in files}).encode()
    scratch.mkdir()
    (scratch / CHECKSUMS).write_bytes(content)
    manifest = ReleaseFile(scratch, CHECKSUMS, CHECKSUMS, len(content), hashlib.sha256(content).hexdigest())
    return replace(whole, files=tuple(files), manifest=manifest)
