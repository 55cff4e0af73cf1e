"""The first records of a job, looked at by a process that runs code of the trainer and imports nothing heavy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.claims import with_places
from finetune_job.finding import Finding
from finetune_job.layout import OutputLayout, WorkspaceLayout
from finetune_job.plan.run_plan import RunPlan

FIRST_RECORDS = 1000
"""Of each source that are shown and counted unless another number is given."""
FIRST_JUDGED = 100
"""Of each source that a command looks at before it does its own work."""
NOT_OF_PREFLIGHT = frozenset({"adapter-base-unnamed"})
"""Findings that no later stage tells."""
SECONDS = 120
"""A chat template of a user's may take any time."""
_PROGRAM = "finetune_trainer.roles.look"
"""Named and not imported: this command has to start where nothing of the trainer is installed."""


@dataclass(frozen=True)
class Look:
    """What was seen."""

    findings: tuple[Finding, ...] = ()
    sources: list[Mapping[str, Any]] = field(default_factory=list)
    """Counts of each source that was read; see SourceLook of the program."""
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """The first of each source: `split`, `place`, `tokens`, `is_dropped`, `pieces` (text, and whether it is learnt)."""
    why_no_tokens: str = ""
    """Why nothing is known of tokens, as a clause; empty: all is known."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokens are known."""
        return not self.why_no_tokens

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
    """Of what is on this machine. directories: of the claims that are here. must_exist: what a claim of these lacks is a finding.
    checks_model: whether the files of the base model are whole. checks_results: whether there are results of another job where
    this one's are to be. checks_places: that, and whether workspace and results can be written. Raises LocalError.
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
            "claims_root": root,
            "settings": plan.data.model_dump(mode="json", exclude={"train", "validation", "packing"}),
            "sources": [{"split": split, **each.model_dump(mode="json")} for split, each in here],
            "model": str(model) if model.is_dir() else None,
            "added_tokens": [token.model_dump() for token in plan.model.added_tokens],
            "model_files": _model_files(plan, Path(root), model) if checks_model and _is_here(plan, directories, model) else None,
            "limit": limit,
            "shown": shown,
            "only_existing": fetched or not must_exist,
            "places": _places(plan, Path(root), directories, writes=checks_places) if checks_places or checks_results else None,
        }
        seen = _answer(order)
        return replace(seen, findings=tuple(with_places(finding, Path(root), directories) for finding in seen.findings))


def _is_here(plan: RunPlan, directories: Mapping[str, Path], model: Path) -> bool:
    """Whether the base model ought to be on this machine. What is to be fetched is not, before the first run."""
    location = plan.model.location
    is_fetched = plan.fetch is not None and any(item.target == location for item in plan.fetch.items)
    return location.claim in directories and (model.is_dir() or not is_fetched)


def _model_files(plan: RunPlan, root: Path, model: Path) -> dict[str, Any]:
    location = plan.model.location
    return {
        "directory": str(model),
        "claim": str(root / location.claim),
        "address": f"pvc://{location.claim}/{location.path}",
        "adapter_base": plan.model.name if plan.method.trains_adapter else None,
    }


def _places(plan: RunPlan, root: Path, directories: Mapping[str, Path], *, writes: bool) -> dict[str, Any]:
    """What is written to, and results that must not exist yet: once this job has trained, they are its own."""
    workspace = WorkspaceLayout(root / plan.workspace.claim / plan.workspace.path)
    output = OutputLayout(root / plan.output.claim / plan.output.path)
    written = {"spec.workspace": plan.workspace, "spec.output.destination": plan.output} if writes else {}
    is_here = writes or plan.output.claim in directories
    return {
        "written": {name: location.model_dump() for name, location in written.items()},
        "output": plan.output.model_dump(),
        "results": [str(output.adapter), str(output.merged)] if is_here and not workspace.adapter.exists() else [],
    }


def _answer(order: Mapping[str, Any]) -> Look:
    """The answer of a process of its own: whatever a template of a user's does there, it does not hang or end this one."""
    command = [sys.executable, "-m", _PROGRAM, "--parent", str(os.getpid()), "--seconds", str(SECONDS)]
    # Looking for plugins of pydantic reads the metadata of every installed distribution.
    environment = {**os.environ, "PYDANTIC_DISABLE_PLUGINS": "__all__"}
    ended = subprocess.run(command, input=json.dumps(order).encode(), capture_output=True, env=environment, check=False)
    if ended.returncode == -signal.SIGALRM:
        raise LocalError(f"the first records of the job take more than {SECONDS} s to look at", ExitCode.FAILED)
    if ended.returncode != 0:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        fix = "install finetune-operator[trainer,cli]" if "No module named" in last[0] else "report this"
        problem = f"the records cannot be looked at: the process that reads them says {last[0]!r}; {fix}"
        raise LocalError(problem, ExitCode.FAILED)
    told = json.loads(ended.stdout)
    findings = tuple(Finding.model_validate(finding) for finding in told["findings"])
    return Look(findings, told["sources"], told["records"], told["why_no_tokens"])
