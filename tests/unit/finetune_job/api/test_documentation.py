"""What fields and words mean, as the strings below them say."""

from enum import StrEnum

from finetune_job.api.documentation import field_docs, member_docs, words
from finetune_job.api.profile import PreflightResources
from finetune_job.failures import EXIT_CODES, FailureClass


class Sample(StrEnum):
    FIRST = "First"
    """What it
    means."""
    SECOND = "Second"


def test_a_member_has_the_string_below_it_on_one_line() -> None:
    assert member_docs(Sample) == {"First": "What it means."}


def test_a_field_has_its_own_meaning_or_that_of_the_base_class() -> None:
    assert field_docs(PreflightResources) == {
        "cpu": "CPU cores.",
        "memory": "Memory.",
        "sharedMemory": "Size limit of /dev/shm, counted against memory.",
    }


def test_every_kind_of_word_is_listed_with_its_meaning() -> None:
    kinds = {word.kind for word in words()}
    assert kinds == {
        "failure class",
        "exit code of a container",
        "condition",
        "reason of a condition or an event",
        "phase of a job",
        "outcome of an attempt",
        "end of a container",
    }
    assert all(word.meaning for word in words())
    code = str(EXIT_CODES[FailureClass.USER_DATA])
    (exit_code,) = [word for word in words() if word.text == code]
    assert exit_code.failure is FailureClass.USER_DATA
    assert exit_code.meaning.startswith("UserData: ")
