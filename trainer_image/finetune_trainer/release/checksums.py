"""Writes SHA256SUMS, which lists the files of a release by their names at the destination, and reads the listed release.

The digests of weights come from the manifests that were written with them, so that no weights are read twice. Before a file
is sent, it is compared with its digest. Whoever can write to the claim can also write this list, and the pod that reads it has
credentials, so the list may only name files below the results, and no link is followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from finetune_job.layout import OutputLayout
from finetune_trainer.context import RunContext
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import (
    MANIFEST_FILE,
    MOST_OWN_BYTES,
    OutsideError,
    SpecialFileError,
    open_beneath,
    read_own,
    sha256_beneath,
    sync_directory,
    write_durably,
)
from finetune_trainer.release.files import (
    BESIDE,
    CARD,
    CHECKSUMS,
    WEIGHT_SUFFIX,
    Release,
    ReleaseFile,
    ReleaseLayout,
    release_layout,
)

_LINE = re.compile(r"([0-9a-f]{64})  (\S[^\n\\]*)")
_INCOMPLETE = "run the merge again: it completes what is missing"
_AGAIN = "delete the results and run the merge again"


def checksum_lines(sha256_of: Mapping[str, str]) -> str:
    """Return digests by name as lines that `sha256sum --check` reads."""
    return "".join(f"{sha256_of[name]}  {name}\n" for name in sorted(sha256_of))


def parse_checksums(text: str) -> dict[str, str] | None:
    """Return the digests by name; None if the text is cut off or was not written by `checksum_lines`."""
    if not text.endswith("\n"):
        return None
    matches = [_LINE.fullmatch(line) for line in text.removesuffix("\n").split("\n")]
    digests = {match[2]: match[1] for match in matches if match is not None}
    return digests if len(digests) == len(matches) and digests else None


def hashed_weights(output: OutputLayout, layout: ReleaseLayout, pattern: str = f"*{WEIGHT_SUFFIX}") -> dict[str, str]:
    """Return the digests of weight files by their names in the results. Raises CheckpointError for an unreadable manifest."""
    digests: dict[str, str] = {}
    for directory in layout.directories:
        known = _known_digests(output.root / directory / MANIFEST_FILE)
        for path in sorted((output.root / directory).rglob(pattern)):
            if path.is_symlink() or not path.is_dir():
                name = path.relative_to(output.root / directory).as_posix()
                digests[f"{directory}/{name}"] = _sha256(output, f"{directory}/{name}", known.get(name))
    return digests


def _sha256(output: OutputLayout, name: str, known: str | None = None) -> str:
    """Return the digest of a file of the results. Raises CheckpointError for a link or a special file, which no merge writes."""
    try:
        with open_beneath(output.root, name):
            return known or sha256_beneath(output.root, name)
    except OSError as error:
        raise CheckpointError(f"{output.root / name}: {error.strerror}", "remove it and run the merge again") from error


def _known_digests(manifest: Path) -> dict[str, str]:
    """Return the manifest's digests of weight files, which are too large to hash again; all other files are hashed again."""
    try:
        listed = json.loads(read_own(manifest))["files"]
        # The trainer writes a mapping by file name, the merge a list.
        entries = listed.items() if isinstance(listed, dict) else ((entry["name"], entry) for entry in listed)
        return {name: str(entry["sha256"]) for name, entry in entries if name.endswith(WEIGHT_SUFFIX)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{manifest} cannot be read ({error})", f"delete {manifest.parent} and run the merge again"
        ) from error


def write_checksums(output: OutputLayout, layout: ReleaseLayout) -> None:
    """Write SHA256SUMS, the last file of the results. Raises CheckpointError if two files would get the same name."""
    digests = hashed_weights(output, layout, "*")
    digests |= {name: _sha256(output, name) for name in BESIDE if os.path.lexists(output.root / name)}
    named = {layout.at_destination(local): sha256 for local, sha256 in digests.items()}
    if len(named) != len(digests):
        taken = [layout.at_destination(local) for local in digests]
        twice = sorted({name for name in taken if taken.count(name) > 1})
        raise CheckpointError(f"{output.root}: two results would have one name at the destination: {twice}", "remove one of them")
    content = checksum_lines(named).encode()
    if output.checksums.is_symlink() or not output.checksums.is_file() or read_own(output.checksums) != content:
        write_durably(output.checksums, content)


def remove_checksums(output: OutputLayout) -> None:
    """Remove SHA256SUMS, which marks the results as complete. Call this before any result changes."""
    if os.path.lexists(output.checksums):
        output.checksums.unlink()
        sync_directory(output.root)


def checksums_match(output: OutputLayout, layout: ReleaseLayout, digests: Mapping[str, str]) -> bool:
    """Whether the results are complete and SHA256SUMS lists these digests. digests: SHA-256 by name in the results."""
    try:
        listed = parse_checksums(read_own(output.checksums).decode())
    except (OSError, ValueError):
        return False
    return listed is not None and all(listed.get(layout.at_destination(name)) == sha256 for name, sha256 in digests.items())


def read_release(context: RunContext) -> Release:
    """Return the complete results of this run, in the order of publishing. Reads the files' sizes, but no weights.

    Raises CheckpointError if the results are not complete, or hold something that no merge has written.
    """
    output, layout = context.output, release_layout(context.plan)
    claim = context.claims_root / context.plan.output.claim
    try:
        with open_beneath(claim, output.checksums.relative_to(claim).as_posix()) as file:
            content = file.read(MOST_OWN_BYTES)
        listed = parse_checksums(content.decode())
    except UnicodeDecodeError:
        listed = None
    except OSError as error:
        raise CheckpointError(f"{output.checksums} cannot be read ({error.strerror})", _INCOMPLETE) from error
    if listed is None:
        raise CheckpointError(f"{output.checksums} is not a list of checksums", _INCOMPLETE)
    files = [_release_file(output, claim, layout.in_results(name), name, sha256) for name, sha256 in listed.items()]
    manifest, plan = output.checksums.relative_to(claim).as_posix(), context.plan
    facts = {
        "job": f"{plan.job.namespace}/{plan.job.name}",
        "job_uid": plan.job.uid,
        "method": plan.method.type.value,
        "base_model": plan.model.name,
        "plan_sha256": context.plan_sha256,
    }
    if plan.model.revision is not None:
        facts["base_revision"] = plan.model.revision
    # Weights come first, the model card last.
    files.sort(key=lambda file: (not file.name.endswith(WEIGHT_SUFFIX), file.name == CARD, file.name))
    return Release(
        files=tuple(files),
        manifest=ReleaseFile(claim, manifest, CHECKSUMS, len(content), hashlib.sha256(content).hexdigest()),
        facts=facts,
    )


def _release_file(output: OutputLayout, claim: Path, local: str, name: str, sha256: str) -> ReleaseFile:
    """Return a listed file with its size. local: its name in the results. Raises CheckpointError."""
    parts = PurePosixPath(local).parts
    if PurePosixPath(local).as_posix() != local or not set(parts).isdisjoint(("/", "..", ".")):
        raise CheckpointError(
            f"{output.checksums} names {name!r}, which is not the name of a file below {output.root}, so no merge has written "
            "this list. Nothing was read or sent",
            f"find out who writes to the claim; {_AGAIN}",
        )
    path = (output.root / local).relative_to(claim).as_posix()
    try:
        with open_beneath(claim, path) as file:
            return ReleaseFile(claim, path, name, os.fstat(file.fileno()).st_size, sha256)
    except (OutsideError, SpecialFileError) as error:
        raise CheckpointError(
            f"{output.root / local}: {error.strerror}, but a merge writes only plain files. Nothing was read or sent",
            f"find out who writes to the claim; {_AGAIN}",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{output.root / local}: {CHECKSUMS} names it, but it cannot be read ({error.strerror})", _INCOMPLETE
        ) from error
