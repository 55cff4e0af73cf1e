"""Examines the first records of a job in a process that runs the trainer's code but needs no slow imports."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.claims import with_places
from finetune_cli.local.launch import answer_of, trainer_command
from finetune_job.finding import Finding
from finetune_job.layout import OutputLayout, WorkspaceLayout
from finetune_job.plan.run_plan import RunPlan

FIRST_RECORDS = 1000
"""Default number of records of each source that are read and counted."""
FIRST_JUDGED = 100
"""Number of records of each source that a command other than `data` checks before it does its own work."""
NOT_OF_PREFLIGHT = frozenset({"adapter-base-unnamed"})
"""Findings that no later stage reports."""
SECONDS = 120
"""Time limit of the process, because a user's chat template may run for any length of time."""
_PROGRAM = "finetune_trainer.roles.look"


@dataclass(frozen=True)
class Look:
    """The answer of the process that examines the records."""

    findings: tuple[Finding, ...] = ()
    sources: list[Mapping[str, Any]] = field(default_factory=list)
    """Counts of each source that was read; see SourceLook of the program."""
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """First records, each with `split`, `place`, `tokens`, `is_dropped` and `pieces` (text, and whether it is learnt)."""
    why_no_tokens: str = ""
    """Why tokens could not be counted, as a clause; empty: they were counted."""

    @property
    def is_refused(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)


def look(
    plan: RunPlan,
    directories: Mapping[str, Path],
    *,
    shown: int = 0,
    limit: int = FIRST_RECORDS,
    must_exist: bool = True,
    checks_model: bool = False,
    checks_results: bool = False,
    checks_places: bool = False,
) -> Look:
    """Examine those files of a job that are on this machine. Raises LocalError.

    directories: claim -> directory, for the claims that are here. must_exist: a missing file on such a claim is a finding.
    checks_model: check that the base model's files are complete. checks_results: check that the place of the results holds no
    results of another job. checks_places: check this as well, and that workspace and results can be written.
    """
    held_out = [] if plan.data.validation is None else [plan.data.validation]
    datasets = [*(("train", dataset) for dataset in plan.data.train), *(("validation", dataset) for dataset in held_out)]
    here = [(split, dataset) for split, dataset in datasets if dataset.location.claim in directories]
    with tempfile.TemporaryDirectory() as root:
        for claim, directory in directories.items():
            Path(root, claim).symlink_to(directory.absolute(), target_is_directory=True)
        # Sources that are fetched do not exist before the first run.
        to_fetch = [] if plan.fetch is None else [item.target for item in plan.fetch.items]
        location = plan.model.location
        model = Path(root, location.claim, location.path)
        model_files = {
            "directory": str(model),
            "claim": str(Path(root, location.claim)),
            "address": f"pvc://{location.claim}/{location.path}",
            "adapter_base": plan.model.name if plan.method.trains_adapter else None,
        }
        is_model_here = location.claim in directories and (model.is_dir() or location not in to_fetch)
        order = {
            "claims_root": root,
            "sources": [{"split": split, **dataset.model_dump(mode="json")} for split, dataset in here],
            "model": str(model) if model.is_dir() else None,
            "model_files": model_files if checks_model and is_model_here else None,
            "plan": plan.model_dump(mode="json"),
            "limit": limit,
            "shown": shown,
            "only_existing": not must_exist or any(dataset.location in to_fetch for _, dataset in here),
            "places": _places(plan, Path(root), directories, writes=checks_places) if checks_places or checks_results else None,
        }
        answer = _answer(order)
        findings = (Finding.model_validate(finding) for finding in answer["findings"])
        places = tuple(with_places(finding, Path(root), directories) for finding in findings)
        return Look(places, answer["sources"], answer["records"], answer["why_no_tokens"])


def _places(plan: RunPlan, root: Path, directories: Mapping[str, Path], *, writes: bool) -> dict[str, Any]:
    """Return the places that are written to, and the results that must not exist yet; after training they are the job's own."""
    workspace = WorkspaceLayout(root / plan.workspace.claim / plan.workspace.path)
    output = OutputLayout(root / plan.output.claim / plan.output.path)
    written = {"spec.workspace": plan.workspace, "spec.output.destination": plan.output} if writes else {}
    is_here = writes or plan.output.claim in directories
    return {
        "written": {name: location.model_dump() for name, location in written.items()},
        "output": plan.output.model_dump(),
        "results": [str(output.adapter), str(output.merged)] if is_here and not workspace.adapter.exists() else [],
    }


def _answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """Examine the files in another process, so that a user's template can neither hang nor end this one. Raises LocalError."""
    command = trainer_command(_PROGRAM, "--seconds", str(SECONDS))
    ended = answer_of(command, given=json.dumps(order).encode())
    if ended.returncode == -signal.SIGALRM:
        raise LocalError(f"reading the job's first records took more than {SECONDS} s", ExitCode.FAILED)
    if ended.returncode != 0:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        fix = "install finetune-operator[trainer,cli]" if "No module named" in last[0] else "report this"
        problem = f"the records cannot be looked at: the process that reads them says {last[0]!r}; {fix}"
        raise LocalError(problem, ExitCode.FAILED)
    return dict(json.loads(ended.stdout))
