"""The first records of a job, looked at by a process of the trainer that imports nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_job.finding import Finding
from finetune_job.layout import OutputLayout, WorkspaceLayout
from finetune_job.plan.run_plan import RunPlan

FIRST_RECORDS = 1000
"""Of each source that are shown and counted unless another number is given."""
FIRST_JUDGED = 100
"""Of each source that a command looks at before it does its own work."""
SECONDS = 120.0
"""A chat template of a user's may take any time."""
_PROGRAM = (
    "from finetune_job.plugins import leave_out_plugins; leave_out_plugins(); "
    "import sys; from finetune_trainer.roles.look import main; sys.exit(main())"
)


@dataclass(frozen=True)
class Look:
    """What was seen."""

    findings: tuple[Finding, ...] = ()
    sources: list[Mapping[str, Any]] = field(default_factory=list)
    """Counts of each source that was read; see SourceLook of the program."""
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """The first of each source: `split`, `place`, `tokens`, `is_dropped`, `pieces` (text, and whether it is learnt)."""
    has_tokenizer: bool = False
    """Otherwise nothing is known of tokens."""

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
    checks_places: bool = False,
) -> Look:
    """Of what is on this machine. directories: of the claims that are here. must_exist: what a claim of these lacks is a finding.
    checks_places: whether results can be written, too. Raises LocalError.
    """
    held_out = [] if plan.data.validation is None else [plan.data.validation]
    datasets = [*(("train", each) for each in plan.data.train), *(("validation", each) for each in held_out)]
    here = [(split, each) for split, each in datasets if each.location.claim in directories]
    with tempfile.TemporaryDirectory() as root:
        for claim, directory in directories.items():
            Path(root, claim).symlink_to(directory.absolute(), target_is_directory=True)
        # What is to be fetched is not there before the first run.
        fetched = plan.fetch is not None and any(item.target == each.location for _, each in here for item in plan.fetch.items)
        model = Path(root, plan.model.location.claim, plan.model.location.path)
        order = {
            "parent": os.getpid(),
            "claims_root": root,
            "settings": plan.data.model_dump(mode="json", exclude={"train", "validation", "packing"}),
            "sources": [{"split": split, **each.model_dump(mode="json")} for split, each in here],
            "model": str(model) if model.is_dir() else None,
            "limit": limit,
            "shown": shown,
            "only_existing": fetched or not must_exist,
            "places": _places(plan, Path(root)) if checks_places else None,
        }
        return _answer(order)


def _places(plan: RunPlan, root: Path) -> dict[str, Any]:
    """What is written to, and results that must not exist yet: once this job has trained, they are its own."""
    workspace = WorkspaceLayout(root / plan.workspace.claim / plan.workspace.path)
    output = OutputLayout(root / plan.output.claim / plan.output.path)
    written = {"spec.workspace": plan.workspace, "spec.output.destination": plan.output}
    return {
        "written": {name: location.model_dump() for name, location in written.items()},
        "results": [] if workspace.adapter.exists() else [str(output.adapter), str(output.merged)],
    }


def _answer(order: Mapping[str, Any]) -> Look:
    try:
        process = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=json.dumps(order).encode(), capture_output=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise LocalError(f"the first records of the job take more than {SECONDS:g} s to look at", ExitCode.FAILED) from error
    if process.returncode != 0:
        said = process.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        fix = "install finetune-operator[trainer,cli]" if "ModuleNotFoundError" in said[0] else "report this"
        raise LocalError(f"the records cannot be looked at: the process that reads them says {said[0]!r}; {fix}", ExitCode.FAILED)
    told = json.loads(process.stdout)
    findings = tuple(Finding.model_validate(finding) for finding in told["findings"])
    return Look(findings, told["sources"], told["records"], told["has_tokenizer"])
