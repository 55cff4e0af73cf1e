"""Where a rehearsal keeps its files: all in one temporary directory.

model/, quiet-model/, prepared/    the twin, the twin without dropout, its data
<run>/                             claims of one run: `model` (a link), `workspace`, `results`
<name>.json, <name>.log            what a child returned and printed
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune_job.layout import WorkspaceLayout
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.rehearsal.twin_plan import MODEL_CLAIM, OUTPUT_CLAIM, WORKSPACE_CLAIM


@dataclass(frozen=True)
class Places:
    """Paths of a rehearsal."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def quiet_model(self) -> Path:
        return self.root / "quiet-model"

    @property
    def prepared(self) -> Path:
        return self.root / "prepared"

    def run(self, name: str, plan: RunPlan, *, quiet: bool = False) -> RunContext:
        """The claims of a run, made when they are first asked for. Runs of one plan differ in nothing but their place."""
        root = self.root / name
        if not root.exists():
            workspace = root / WORKSPACE_CLAIM
            workspace.mkdir(parents=True)
            (root / OUTPUT_CLAIM).mkdir()
            model = self.quiet_model if quiet and self.quiet_model.exists() else self.model
            (root / MODEL_CLAIM).symlink_to(model.absolute(), target_is_directory=True)
            WorkspaceLayout(workspace).prepared.symlink_to(self.prepared.absolute(), target_is_directory=True)
        return RunContext(plan, plan_sha256(plan), root, attempt=0)
