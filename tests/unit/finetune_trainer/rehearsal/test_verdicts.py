"""What a rehearsal saw -> a finding of the right weight, with the field and the fix that the message names."""

from pathlib import Path

import pytest

from finetune_job.api.job import RunSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.failures import FailureClass
from finetune_job.plan.resolve import placement_of
from finetune_trainer.inspection.report import Stage
from finetune_trainer.rehearsal.verdicts import Inconclusive, StageFailure, failed_finding, failure_of_stage, not_done_finding
from tests.support.tiny_model import plan_of, tiny_spec

ROOT = Path("/scratch/rehearsal")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (FailureClass.HOST_OUT_OF_MEMORY, Inconclusive),
        (FailureClass.DISK_FULL, Inconclusive),
        (FailureClass.USER_CONFIG, StageFailure),
        (None, StageFailure),
    ],
)
def test_a_machine_that_is_too_small_says_nothing_about_the_job(failure: FailureClass | None, expected: type[Exception]) -> None:
    found = failure_of_stage(Stage.TRAIN, "it broke", "do this", failure)
    assert type(found) is expected
    assert str(found) == "it broke"


def test_a_message_that_names_its_field_gives_the_finding_that_field() -> None:
    problem = StageFailure(Stage.TRAIN, "spec.training.weightDecay: cannot be", "leave it unset")
    finding = failed_finding(problem, plan_of(tiny_spec()), ROOT)
    assert (finding.rule, finding.severity) == ("rehearsal-failed", "error")
    assert (finding.field, finding.value, finding.fix) == ("spec.training.weightDecay", "LoRA", "leave it unset")
    assert finding.message.endswith("fails: cannot be")


def test_a_failure_without_field_or_hint_is_one_of_the_method_and_can_be_skipped() -> None:
    finding = failed_finding(StageFailure(Stage.MERGE, f"{ROOT}/model is odd"), plan_of(tiny_spec()), ROOT)
    assert finding.field == "spec.method"
    assert "<rehearsal>/model is odd" in finding.message
    assert "set spec.preflight.rehearsal: Skip" in finding.fix
    profile = FineTuneProfileSpec.model_validate({"trainerImage": "t", "requireRehearsal": True})
    strict = plan_of(tiny_spec()).model_copy(update={"placement": placement_of("strict", profile, RunSpec())})
    finding = failed_finding(StageFailure(Stage.MERGE, "it is odd"), strict, ROOT)
    assert finding.fix == "change the settings that it names"


def test_a_rehearsal_that_could_not_end_is_a_warning_with_a_change() -> None:
    finding = not_done_finding("x" * 1000, ROOT)
    assert (finding.rule, finding.severity) == ("rehearsal-not-done", "warning")
    assert finding.message.endswith("x" * 10 + "...")
    assert len(finding.message) < 700
    assert [(change.field, change.value) for change in finding.changes] == [("spec.preflight.rehearsal", "Skip")]
