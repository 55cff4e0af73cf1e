"""The tasks of a rehearsal's children notice what raises no exception of its own."""

import shutil
from pathlib import Path

import pytest

from finetune_job.failures import Outcome, TerminationReport
from finetune_trainer.context import RunContext
from finetune_trainer.rehearsal import child_tasks
from tests.support.tiny_model import run_context, tiny_spec


def role(facts: dict[str, str], *, makes_model: bool) -> child_tasks.MergeRole:
    def merge(context: RunContext) -> TerminationReport:
        if makes_model:
            context.output.merged.mkdir(parents=True)
        return TerminationReport(role="merge", outcome=Outcome.SUCCEEDED, time=0.0, facts=facts)

    return merge


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return run_context(tmp_path, tiny_spec())


def test_a_merge_that_makes_nothing_is_noticed(context: RunContext) -> None:
    assert context.plan.merge.enabled
    with pytest.raises(child_tasks.RehearsalError, match="ended without a merged model"):
        child_tasks.merge(role({"verification_sha256": "a"}, makes_model=False), context)


def test_a_merge_that_verifies_nothing_is_noticed(context: RunContext) -> None:
    with pytest.raises(child_tasks.RehearsalError, match="was not verified"):
        child_tasks.merge(role({}, makes_model=True), context)


def test_the_facts_of_a_verified_merge_are_passed_on(context: RunContext) -> None:
    facts = {"verification_sha256": "a", "kl": "0.1"}
    assert child_tasks.merge(role(facts, makes_model=True), context) == facts


def test_a_rank_that_fails_raises_what_its_report_says(context: RunContext) -> None:
    shutil.rmtree(context.workspace.prepared)
    with pytest.raises(child_tasks.RehearsalError) as caught:
        child_tasks.run_rank(context, 0, 1, "")
    assert str(context.workspace.prepared) in str(caught.value)
