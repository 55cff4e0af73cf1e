"""The plan is the one that was announced."""

import hashlib
import json
from pathlib import Path

import pytest

from finetune_job.api.base import ClaimPath
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_trainer.__main__ import main
from finetune_trainer.context import read_plan
from finetune_trainer.errors import PlanMismatchError
from tests.support.tiny_model import run_context, tiny_spec


@pytest.mark.parametrize("content", ["{}", "not the plan", None])
def test_a_plan_with_another_digest_is_refused(tmp_path: Path, content: str | None) -> None:
    plan = tmp_path / "plan.json"
    if content is not None:
        plan.write_text(content)
    log = tmp_path / "log"
    arguments = {"--plan": plan, "--plan-sha256": "0" * 64, "--termination-log": log, "--claims-root": tmp_path}
    code = main(["train", *(str(part) for pair in arguments.items() for part in pair)])
    assert code == EXIT_CODES[FailureClass.PLAN_MISMATCH]
    assert json.loads(log.read_text())["failure"] == "PlanMismatch"


def test_a_plan_of_another_release_is_refused_with_its_first_problem(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(PlanMismatchError, match="does not understand it") as caught:
        read_plan(path, hashlib.sha256(b"{}").hexdigest())
    assert caught.value.hint == "use a trainer image of the operator's release"


def test_locations_are_below_the_mounts_of_their_claims(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    location = ClaimPath(claim="models", path="deep/down")
    assert context.path(location) == context.claims_root / "models" / "deep" / "down"
    assert context.workspace.root == context.claims_root / context.plan.workspace.claim / context.plan.workspace.path
