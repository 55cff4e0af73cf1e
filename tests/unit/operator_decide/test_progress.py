"""What of a run's progress stands in status."""

from finetune_job.progress import Progress
from finetune_operator.decide.progress import progress_of_facts, progress_status

PROGRESS = Progress(attempt=2, step=3, total_steps=10, loss=1.5, mfu=0.41234567, goodput=0.875, checkpoint_step=2)


def test_fractions_stand_in_status_as_text() -> None:
    status = progress_status(PROGRESS)
    assert (status.mfu, status.goodput, status.loss, status.eval_loss) == ("0.412346", "0.875", "1.5", "")
    assert status.summary == "3/10"


def test_facts_of_the_last_report_read_back() -> None:
    assert progress_of_facts({**PROGRESS.facts(), "badput.startup": "3.000", "adapter_sha256": "00"}, 2) == PROGRESS
