"""`finetune explain`: every word that the product prints has an answer, and an unknown one a suggestion."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_job.catalogue.book import ENTRIES
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_job.rules.book import RULES
from finetune_job.rules.cel.condition import TRANSITIONS


def run(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


def explained(word: str) -> str:
    """What is printed, with its lines joined."""
    answer = run(word)
    assert answer.exit_code == 0, answer.output
    return " ".join(answer.output.split())


def test_a_rule_is_explained_with_its_evidence():
    shown = explained("wrap-class-list-empty")
    for part in (
        "refuses the job",
        "spec.parallelism.fsdp.transformerLayerClsToWrap",
        "API server",
        "no error: one unit holds the whole model",
        ".venv/bin/pytest",
        "tests/pitfalls/test_wrapping.py",
        "peft/utils/other.py",
    ):
        assert part in shown
    unproven = next(rule for rule in RULES if rule.reproduction is None)
    assert "there is no reproduction" in explained(unproven.id)
    assert explained(" WRAP_CLASS_LIST_EMPTY") == shown


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("token-index-unknown", ("gate: preflight", "refuses the job", "test_rows_beyond_the_embedding_are_refused")),
        ("trained-token-unread", ("refuses some jobs, and warns of others",)),
        ("rehearsal-not-done", ("gate: rehearsal", "warns")),
        ("unreadable", ("gate: schema", "not an object of this API")),
        ("frozen-after-start", ("refuses the change", "create a new job")),
        ("DeviceOutOfMemory", ("failure class", "code 44", "retry: no", "spec.training.microBatchSize")),
        ("preflight/UserModel", ("UserModel: failure class", "code 42")),
        ("nodelost", ("NodeLost: failure class", "NodeLost: reason", "retry: not counted")),
        ("44", ("exit code of a container", "DeviceOutOfMemory")),
        ("3", ("exit code of finetune", "A run failed.")),
        ("Stalled", ("Stalled: failure class", "Stalled: condition", "code 53")),
        ("WaitingInLine", ("reason of a condition or an event", "maxActiveJobs")),
    ],
)
def test_other_words_are_explained(word, parts):
    shown = explained(word)
    assert [part for part in parts if part not in shown] == []


def test_every_word_that_the_product_prints_is_explained():
    words = [
        *(rule.id for rule in RULES),
        *(each.rule for each in TRANSITIONS),
        *(entry.id for entry in ENTRIES),
        *FailureClass,
        *(f"{role}/{failure}" for role in Role for failure in FailureClass),
        *map(str, EXIT_CODES.values()),
        *ConditionType,
        *Reason,
        *("0", "1", "2", "3", "130"),
    ]
    from finetune_cli.commands.explain import explain

    assert [word for word in words if word.rpartition("/")[2] not in explain(word)] == []


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("wrap-class-blank", "wrap-class-name-blank"),
        ("token-indx-unknown", "token-index-unknown"),
        ("DeviceOutofMemori", "DeviceOutOfMemory"),
        ("waiting in lines", "WaitingInLine"),
    ],
)
def test_an_unknown_word_is_answered_with_what_is_like_it(word, meant):
    answer = run(word)
    assert answer.exit_code == 2
    assert f"nothing is called {word}; did you mean " in answer.output
    assert meant in answer.output


def test_a_word_that_is_like_nothing_leads_to_the_list():
    answer = run("xyzzy")
    assert answer.exit_code == 2
    assert answer.output == "nothing is called xyzzy; `finetune explain` lists all findings\n"


def test_all_findings_are_listed_by_topic():
    listed = run().output
    for identifier in (*(rule.id for rule in RULES), *(entry.id for entry in ENTRIES)):
        assert f" {identifier} " in listed
    assert listed.startswith("wrapping\n  error   wrap-class-list-empty")
    assert "\nbase model: files\n  error   model-directory-missing" in listed
