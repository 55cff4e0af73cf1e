"""What a plan records as chosen."""

from finetune_job.plan.choices import Choices


def test_only_what_was_left_open_is_a_choice() -> None:
    choices = Choices()
    assert choices.pick("training.seed", 0, 7, "any number") == 0
    assert choices.made == []
    assert choices.pick("training.seed", None, 7, "any number") == 7
    (made,) = choices.made
    assert (made.field, made.value, made.reason) == ("spec.training.seed", 7, "any number")
