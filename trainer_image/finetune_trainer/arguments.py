"""The arguments that every role and every rank has."""

from __future__ import annotations

import argparse
from pathlib import Path

from finetune_job.names import CLAIMS_MOUNT
from finetune_trainer.context import RunContext, read_plan


def add_run_arguments(arguments: argparse.ArgumentParser) -> None:
    """What every role and every rank is told."""
    arguments.add_argument("--plan", type=Path, required=True)
    arguments.add_argument("--plan-sha256", required=True)
    arguments.add_argument("--claims-root", type=Path, default=Path(CLAIMS_MOUNT))
    arguments.add_argument("--attempt", type=int, default=0)


def run_context(arguments: argparse.Namespace) -> RunContext:
    """The plan that the arguments name. Raises PlanMismatchError."""
    plan = read_plan(arguments.plan, arguments.plan_sha256)
    return RunContext(plan, arguments.plan_sha256, arguments.claims_root, arguments.attempt)
