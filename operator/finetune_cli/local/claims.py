"""Claims of a job as directories on this machine: a directory of links takes the place of a pod's mounts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune_cli.exit_codes import LocalError
from finetune_job.api.base import ClaimPath
from finetune_job.finding import Finding
from finetune_job.plan.inputs import input_locations
from finetune_job.plan.run_plan import RunPlan

OUTPUT_CLAIM = "output-directory"
"""Name under which `--output-dir` appears in a plan."""
LOCAL_UID = "local"
"""Stands in for the UID that an API server assigns, so that the same job always finds its workspace."""
_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")


@dataclass(frozen=True)
class ClaimUse:
    """One claim of a plan."""

    name: str
    field: str
    """The first field of the manifest that names the claim."""
    is_input: bool
    """Whether the claim must exist; other claims are created."""


def parse_claims(written: Sequence[str]) -> dict[str, Path]:
    """Parse `NAME=PATH` arguments. Raises LocalError."""
    paths: dict[str, Path] = {}
    for text in written:
        name, separator, path = text.partition("=")
        if not separator or not path or not _NAME.match(name):
            raise LocalError(
                f"--claim {text} is not of the form NAME=PATH; give a claim name and a directory, e.g. models=/srv/models"
            )
        if name in paths:
            raise LocalError(f"--claim {text}: {name} is already {paths[name]}; give each claim once")
        paths[name] = Path(path)
    return paths


def claims_of(plan: RunPlan) -> list[ClaimUse]:
    """Return each claim that the plan names, inputs first."""
    start = plan.training.start_from
    named: list[tuple[str, ClaimPath, bool]] = [
        *((field, location, location.claim != plan.workspace.claim) for field, location in input_locations(plan)),
        *([("spec.training.startFrom", start, start.claim != plan.workspace.claim)] if start is not None else []),
        ("spec.workspace", plan.workspace, False),
        ("spec.output.destination", plan.output, False),
    ]
    uses: dict[str, ClaimUse] = {}
    for field, location, is_input in named:
        uses.setdefault(location.claim, ClaimUse(location.claim, field, is_input))
    return list(uses.values())


def check_given(claims: Sequence[ClaimUse], given: Mapping[str, Path]) -> None:
    """Check that the job names every claim whose directory is given. Raises LocalError if it does not."""
    unknown = sorted(set(given) - {use.name for use in claims})
    if unknown:
        raise LocalError(f"--claim {unknown[0]}: the job names no such claim; it names {', '.join(use.name for use in claims)}")


def claim_directories(uses: Sequence[ClaimUse], root: Path, given: Mapping[str, Path]) -> dict[str, Path]:
    """Return the directory of each claim: the given one, else `root`/name."""
    return {use.name: (given.get(use.name) or root / use.name).absolute() for use in uses}


def link_claims(uses: Sequence[ClaimUse], places: Mapping[str, Path], view: Path) -> None:
    """Make `view` hold a link for each claim, and nothing else. Raises OSError, or LocalError if an input does not exist; the old
    links then stay, because `--fresh` needs them to find what to remove.
    """
    for use in uses:
        place = places[use.name]
        if use.is_input and not place.is_dir():
            raise LocalError(
                f"{use.field}: claim {use.name} is the directory {place}, which does not exist; "
                f"make it, or say where the claim is with --claim {use.name}=PATH"
            )
        place.mkdir(parents=True, exist_ok=True)
    view.mkdir(parents=True, exist_ok=True)
    # Names of claims never begin with a dot, so these temporary links cannot replace a claim's link.
    fresh = {use.name: view / f".{use.name}" for use in uses}
    # All links are made before the first one replaces an old one, so that an error leaves the old links as they were.
    for name, link in fresh.items():
        link.unlink(missing_ok=True)
        link.symlink_to(places[name], target_is_directory=True)
    for name, link in fresh.items():
        link.replace(view / name)
    for old in view.iterdir():
        if old.name not in fresh:
            old.unlink()


def with_places(finding: Finding, view: Path, directories: Mapping[str, Path]) -> Finding:
    """Replace the links to claims in a finding's message by the claims' directories."""
    message = finding.message
    # The name of a claim may begin with the name of another, so the longest names are replaced first.
    for claim in sorted(directories, key=len, reverse=True):
        message = message.replace(str(view / claim), str(directories[claim]))
    return finding.model_copy(update={"message": message})
