"""What of a run is computed again, and where."""

import io
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.claims import claims_of
from finetune_cli.local.launch import Interruption
from finetune_cli.local.local_run import LocalRun
from finetune_cli.local.replay import (
    SCRATCH_CLAIM,
    Interval,
    Replay,
    check_ranks,
    claims_of_run,
    draw,
    kept_intervals,
    replay_plan,
)
from finetune_cli.local.run_directory import RunDirectory, holder_of
from finetune_cli.render.run import LiveView
from finetune_job.api.base import ClaimPath
from finetune_job.api.training import GradientReduction
from finetune_job.names import Role
from finetune_job.plan.digest import learning_sha256
from finetune_job.plan.run_plan import RunPlan
from tests.support.cases import table
from tests.unit.finetune_cli.local_jobs import PLAN


def with_ranks(reduction: GradientReduction, nodes: int = 1) -> RunPlan:
    parallelism = PLAN.parallelism.model_copy(update={"nodes": nodes, "processes_per_node": 2})
    training = PLAN.training.model_copy(update={"reduction": reduction})
    return PLAN.model_copy(update={"parallelism": parallelism, "training": training})


@pytest.mark.parametrize(("steps", "expected"), table(__file__, "test_intervals_lie_between_kept_checkpoints"))
def test_intervals_lie_between_kept_checkpoints(steps: list[int], expected: list[list[int]]) -> None:
    assert [[each.start, each.end] for each in kept_intervals(steps)] == expected


def test_a_seed_draws_the_same_intervals_in_their_order_and_each_can_be_drawn() -> None:
    intervals = kept_intervals([2, 4, 6, 8])
    assert draw(intervals, 2, 7) == draw(intervals, 2, 7)
    assert {each.end for seed in range(50) for each in draw(intervals, 1, seed)} == {2, 4, 6, 8}
    assert draw(intervals, 9, 0) == intervals
    assert all(one.end < two.end for one, two in (draw(intervals, 2, seed) for seed in range(20)))
    assert str(Interval(2, 4)) == "steps 3 to 4"


def test_the_plan_learns_the_same_and_writes_elsewhere() -> None:
    plan = replay_plan(PLAN)
    assert learning_sha256(plan) == learning_sha256(PLAN)
    assert {plan.workspace.claim, plan.output.claim} == {SCRATCH_CLAIM}
    assert (plan.fetch, plan.publish, plan.rehearses) == (None, None, False)
    named = PLAN.model_copy(update={"output": ClaimPath(claim=SCRATCH_CLAIM, path="x")})
    with pytest.raises(LocalError, match=rf"claim {SCRATCH_CLAIM}: .*rename it"):
        replay_plan(named)


def test_only_ordered_sums_are_the_same_on_another_number_of_ranks() -> None:
    ordered, fast = with_ranks(GradientReduction.ORDERED), with_ranks(GradientReduction.FAST)
    for plan, ranks in ((ordered, 1), (ordered, None), (fast, None), (fast, 2), (with_ranks(GradientReduction.ORDERED, 2), 3)):
        check_ranks(plan, ranks)
    for plan, ranks, said in (
        (fast, 1, "--ranks 1: the run adds up gradients in an order that depends on its 2 ranks"),
        (ordered, 3, "--ranks 3: the run has 2; give at most as many"),
        (with_ranks(GradientReduction.FAST, 2), None, "spec.parallelism.nodes: the run has 2"),
    ):
        with pytest.raises(LocalError, match=said):
            check_ranks(plan, ranks)


def test_inputs_are_read_where_they_are_and_a_missing_claim_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.claims.mkdir(parents=True)
    for use in claims_of(PLAN):
        (tmp_path / use.name).mkdir()
        (run.claims / use.name).symlink_to(tmp_path / use.name)
    claims = claims_of_run(run, PLAN, {})
    workspace = claims[PLAN.workspace.claim] / PLAN.workspace.path
    (workspace / "prepared").mkdir(parents=True)
    (workspace / "preflight.json").write_text("{}")
    (workspace / "checkpoints/step-0000000002").mkdir(parents=True)
    (workspace / "checkpoints/step-0000000002/manifest.json").write_text("{}")
    replay = Replay(PLAN, claims, tmp_path / "scratch")
    replay.take_inputs(["step-0000000002"])
    model = PLAN.model.location.claim
    assert (replay.place.claims / model).resolve() == tmp_path / model
    assert replay.workspace.root.resolve() == (replay.place.claims / SCRATCH_CLAIM / "workspace").resolve()
    assert replay.workspace.prepared.resolve() == workspace / "prepared"
    assert (replay.workspace.checkpoints / "step-0000000002/manifest.json").read_text() == "{}"
    assert not (replay.workspace.checkpoints / "step-0000000002").is_symlink()

    (tmp_path / model).rename(tmp_path / "moved")
    with pytest.raises(LocalError, match=rf"claim {model} was the directory {tmp_path / model}.*--claim {model}=PATH"):
        claims_of_run(run, PLAN, {})
    assert claims_of_run(run, PLAN, {model: tmp_path / "moved"})[model] == tmp_path / "moved"


@pytest.mark.parametrize("may_link", [True, False])
def test_a_base_with_added_tokens_is_on_the_scratch_claim_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_link: bool
) -> None:
    """As the trainer reads it: a directory of files, none of which leads out of its claim."""
    claims = {use.name: tmp_path / use.name for use in claims_of(PLAN)}
    workspace = claims[PLAN.workspace.claim] / PLAN.workspace.path
    (workspace / "base-with-added-tokens/additional_chat_templates").mkdir(parents=True)
    (workspace / "base-with-added-tokens/model.safetensors").write_text("weights")
    (workspace / "base-with-added-tokens/additional_chat_templates/tool_use.jinja").write_text("template")
    (workspace / "added-tokens.json").write_text("{}")
    for place in claims.values():
        place.mkdir(exist_ok=True)

    def refuse(*_arguments: object) -> None:
        raise OSError(18, "another file system")

    if not may_link:
        monkeypatch.setattr("os.link", refuse)
    replay = Replay(PLAN, claims, tmp_path / "scratch")
    replay.take_inputs([])
    taken = replay.workspace.base_with_tokens
    assert (taken / "model.safetensors").read_text() == "weights"
    assert (taken / "additional_chat_templates/tool_use.jinja").read_text() == "template"
    assert (taken / "model.safetensors").samefile(workspace / "base-with-added-tokens/model.safetensors") is may_link
    assert not taken.is_symlink()
    assert replay.workspace.added_tokens.read_text() == "{}"


def test_roles_run_one_after_the_other_in_a_directory_that_the_trainer_s_process_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, kept = [], []

    class ServedRun(LocalRun):
        """The process that serves is started with the first role, and ends with the trainer."""

        def execute(self, *_: object, roles: Sequence[Role], **__: object) -> ExitCode:
            ran.extend(roles)
            kept[:] = kept or [os.dup(self.lock)]
            return ExitCode.DONE

    monkeypatch.setattr("finetune_cli.local.replay.LocalRun", ServedRun)
    claims = {use.name: tmp_path / use.name for use in claims_of(PLAN)}
    for place in claims.values():
        place.mkdir()
    view = LiveView(Console(file=io.StringIO()), "again")
    with Replay(PLAN, claims, tmp_path / "scratch") as replay:
        for role in (Role.PREFLIGHT, Role.TRAIN):
            replay.run((role,), view, Interruption(), ranks=None)
    os.close(kept[0])
    assert ran == [Role.PREFLIGHT, Role.TRAIN]
    assert holder_of(replay.place) is None, "and is nobody's afterwards"
