"""Defines the context of every role and every rank: the plan, verified by its digest, the mounts, and the arguments."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from finetune_job.api.base import ClaimPath
from finetune_job.layout import OutputLayout, WorkspaceLayout
from finetune_job.names import CLAIMS_MOUNT
from finetune_job.plan.digest import learning_sha256
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.added_tokens import FIELD, read_added_tokens, with_trained_rows
from finetune_trainer.errors import ModelError, PlanMismatchError
from finetune_trainer.files import link_root


@dataclass(frozen=True)
class RunContext:
    """The context of one role in one attempt."""

    plan: RunPlan
    plan_sha256: str
    claims_root: Path
    attempt: int
    links_lead_to: Path | None = None
    """Directory that must contain the targets of the base model's symlinks; None: the base's claim or Hugging Face cache."""
    until_step: int | None = None
    """Optimizer step after which training saves its state and stops without a result; None: training runs to the end."""

    def path(self, location: ClaimPath) -> Path:
        """Return the path of a location on a mounted claim."""
        return self.claims_root / location.claim / location.path

    @property
    def workspace(self) -> WorkspaceLayout:
        return WorkspaceLayout(self.path(self.plan.workspace))

    @property
    def output(self) -> OutputLayout:
        return OutputLayout(self.path(self.plan.output))

    @property
    def source_model(self) -> Path:
        """Directory of the model that the job names, or of the fetched copy."""
        return self.path(self.plan.model.location)

    @property
    def base_model(self) -> Path:
        """Directory of the model that is trained and merged with adapters: the source, or preflight's copy with added tokens."""
        return self.workspace.base_with_tokens if self.plan.model.added_tokens else self.source_model

    @property
    def base_model_root(self) -> Path:
        """Directory that must contain the targets of the base model's symlinks."""
        claim = self.plan.workspace.claim if self.plan.model.added_tokens else self.plan.model.location.claim
        return self.links_lead_to or link_root(self.base_model, self.claims_root / claim)

    def with_trained_rows(self) -> RunContext:
        """Return this context or, if the job adds tokens, a copy whose plan also trains the rows of these tokens.

        Raises ModelError if preflight's record of these tokens is missing or malformed, and OSError if it cannot be read.
        """
        if not self.plan.model.added_tokens:
            return self
        path = self.workspace.added_tokens
        added = read_added_tokens(path)
        if added is None:
            # Without the ids of added tokens, the job would silently train none of their rows.
            hint = "start a new job, and let nothing else write to its workspace"
            raise ModelError(f"{path} is missing; it records the ids of the tokens in {FIELD}", hint)
        return replace(self, plan=with_trained_rows(self.plan, added))

    @property
    def learning_sha256(self) -> str:
        """Digest of everything that determines what this run learns. It does not depend on the number of ranks."""
        return learning_sha256(self.plan)


def read_plan(path: Path, sha256: str) -> RunPlan:
    """Read the plan at `path`, whose bytes must have the announced digest. Raises PlanMismatchError."""
    try:
        encoded = path.read_bytes()
    except OSError as error:
        raise PlanMismatchError(
            f"--plan {path} cannot be read ({error})", "mount the plan's ConfigMap, or give the path of plan.json"
        ) from error
    digest = hashlib.sha256(encoded).hexdigest()
    if digest != sha256:
        raise PlanMismatchError(
            f"--plan {path}: sha256 is {digest}, but {sha256} was announced", "the plan changed after the start; start a new job"
        )
    try:
        return RunPlan.model_validate_json(encoded)
    except ValidationError as error:
        raise PlanMismatchError(
            f"--plan {path}: this trainer does not understand it ({error.error_count()} problems, first: {error.errors()[0]})",
            "use a trainer image of the operator's release",
        ) from error


def add_run_arguments(arguments: argparse.ArgumentParser) -> None:
    """Add the arguments that every role and every rank takes."""
    arguments.add_argument("--plan", type=Path, required=True)
    arguments.add_argument("--plan-sha256", required=True)
    arguments.add_argument("--claims-root", type=Path, default=Path(CLAIMS_MOUNT))
    arguments.add_argument("--attempt", type=int, default=0)


def add_until_step(arguments: argparse.ArgumentParser) -> None:
    """Add the argument that only the training programs take."""
    arguments.add_argument("--until-step", type=int, help="end after this optimizer step, with the state saved and no result")


def run_context(arguments: argparse.Namespace) -> RunContext:
    """Make the context from the arguments, and read the frozen plan that they name. Raises PlanMismatchError."""
    plan = read_plan(arguments.plan, arguments.plan_sha256)
    until = getattr(arguments, "until_step", None)
    return RunContext(plan, arguments.plan_sha256, arguments.claims_root, arguments.attempt, until_step=until)
