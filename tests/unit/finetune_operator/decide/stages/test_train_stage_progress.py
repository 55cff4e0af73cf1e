"""What status shows of a run's progress."""

from finetune_job.progress import Progress
from finetune_operator.decide.stages.train_stage import progress_of_facts, progress_status
from tests.support.builders import T0, after

PROGRESS = Progress(
    attempt=2,
    step=3,
    total_steps=10,
    loss=1.5,
    mfu=0.41234567,
    calculated_tokens_per_second=1234.5678,
    goodput=0.875,
    checkpoint_step=2,
)


def test_fractions_stand_in_status_as_text() -> None:
    status = progress_status(PROGRESS, None, T0)
    assert (status.mfu, status.goodput, status.loss, status.eval_loss) == ("0.412346", "0.875", "1.5", "")
    assert status.calculated_tokens_per_second == "1234.57"
    assert status.summary == "3/10"


def test_the_time_of_the_last_new_step_stays_while_no_new_one_comes() -> None:
    first = progress_status(PROGRESS, None, T0)
    assert first.advanced_time == "2026-01-01T12:00:00Z"
    same = progress_status(PROGRESS.model_copy(update={"loss": 1.0}), first, after(60))
    assert (same.loss, same.advanced_time) == ("1", "2026-01-01T12:00:00Z")
    newer = progress_status(PROGRESS.model_copy(update={"step": 4}), same, after(90))
    assert newer.advanced_time == "2026-01-01T12:01:30Z"
    back = progress_status(PROGRESS.model_copy(update={"step": 2}), newer, after(120))
    assert back.advanced_time == "2026-01-01T12:02:00Z", "a restarted gang that repeats steps makes progress"


def test_the_time_of_a_checkpoint_is_when_a_newer_one_was_heard_of() -> None:
    first = progress_status(PROGRESS, None, T0)
    assert first.checkpoint_time == "2026-01-01T12:00:00Z"
    for step in (2, 1, None):
        same = progress_status(PROGRESS.model_copy(update={"checkpoint_step": step}), first, after(60))
        assert same.checkpoint_time == "2026-01-01T12:00:00Z", "an older one is loaded, or the same"
    newer = progress_status(PROGRESS.model_copy(update={"checkpoint_step": 3}), first, after(90))
    assert newer.checkpoint_time == "2026-01-01T12:01:30Z"
    assert progress_status(PROGRESS.model_copy(update={"checkpoint_step": None}), None, T0).checkpoint_time == ""


def test_the_first_step_keeps_its_time_through_restarts() -> None:
    none = progress_status(PROGRESS.model_copy(update={"step": 0}), None, T0)
    assert none.first_step_time == ""
    first = progress_status(PROGRESS, none, after(60))
    assert first.first_step_time == "2026-01-01T12:01:00Z"
    assert progress_status(PROGRESS.model_copy(update={"step": 1}), first, after(90)).first_step_time == "2026-01-01T12:01:00Z"


def test_facts_of_the_last_report_read_back() -> None:
    assert progress_of_facts({**PROGRESS.facts(), "badput.startup": "3.000", "adapter_sha256": "00"}, 2) == PROGRESS
