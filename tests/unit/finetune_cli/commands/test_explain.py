"""`finetune explain`: every word that the product prints has an answer, and an unknown one a suggestion."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.cluster import CheckId
from finetune_cli.commands.explain import explain
from finetune_cli.corrections.foreign import answer, answer_without_value, rows
from finetune_cli.render.explanations import explained_text
from finetune_job.catalogue.book import entries
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.fields import all_fields
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Phase, Reason
from finetune_job.rules.book import RULES
from finetune_job.rules.cel.condition import TRANSITIONS
from tests.support.cases import table


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
    unproven = next(rule for rule in RULES if not rule.test)
    assert "there is no reproduction" in explained(unproven.id)
    assert explained(" WRAP_CLASS_LIST_EMPTY") == shown


@pytest.mark.parametrize(("word", "parts"), table(__file__, "test_other_words_are_explained"))
def test_other_words_are_explained(word, parts):
    shown = explained(word)
    assert [part for part in parts if part not in shown] == []


SETTINGS = table(__file__, "SETTINGS")
"""Settings of other tools with their explanations."""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_another_tool_is_explained_without_a_value(name):
    meanings = json.loads(run(name, "-o", "json").output)["meanings"]
    assert [each["means"] for each in meanings if each["is"] == "setting of other tools"] == [SETTINGS[name]]


PROBES = (True, False, 8, "word", ["a"])


def test_no_explanation_of_a_setting_takes_a_value_that_nobody_has_named():
    for name in {name for row in rows().values() for name in row["names"]}:
        text, fixes = answer_without_value(name), {answer(name, value, {}).fix for value in PROBES}
        assert text.endswith(".")
        by_value = f"For {name}: " in text or text in (SETTINGS["gradient_accumulation_steps"], SETTINGS["num_warmup_steps"])
        assert (len(fixes) > 1) <= by_value, (name, fixes)
        assert not {"None", "False", "True"} & set(text.replace("activationCheckpointing: None", "").split()), text


def test_every_word_that_the_product_prints_is_explained():
    words = [
        *(rule.id for rule in RULES),
        *(each.rule for each in TRANSITIONS),
        *entries(),
        *FailureClass,
        *(f"{role}/{failure}" for role in Role for failure in FailureClass),
        *map(str, EXIT_CODES.values()),
        *ConditionType,
        *Reason,
        *Phase,
        *AttemptOutcome,
        *CheckId,
        *("0", "1", "2", "3", "130"),
    ]
    words += sorted(fields_of_the_crds())
    assert len(words) > 500
    assert [word for word in words if word.rpartition("/")[2] not in explained_text(explain(word))] == []


def test_every_value_of_a_field_is_explained_as_one():
    values = {value: field.path for field in all_fields() for value in field.values if field.path.startswith("spec.")}
    assert len(values) > 100
    assert [value for value, path in values.items() if f"{value}: value of " not in explained_text(explain(value))] == []


def fields_of_the_crds() -> set[str]:
    """Paths of all fields, as the files that users install have them."""
    found: set[str] = set()
    for file in sorted((Path(__file__).parents[4] / "crds").glob("*.yaml")):
        schema = yaml.safe_load(file.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for root in ("spec", "status"):
            if root in schema["properties"]:
                found |= {root, *_paths(root, schema["properties"][root])}
    return found


def _paths(path: str, node: dict[str, Any]) -> Iterator[str]:
    if "items" in node:
        path, node = f"{path}[]", node["items"]
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from _paths(f"{path}.{name}", child)


@pytest.mark.parametrize(("word", "meant"), table(__file__, "test_an_unknown_word_is_answered_with_what_is_like_it"))
def test_an_unknown_word_is_answered_with_what_is_like_it(word, meant):
    answer = run(word)
    assert answer.exit_code == 2
    assert f"unknown term: {word}; did you mean " in answer.output
    assert meant in answer.output


def test_a_word_that_is_like_nothing_leads_to_the_list():
    answer = run("xyzzy")
    assert answer.exit_code == 2
    assert answer.output == "unknown term: xyzzy; `finetune explain` lists all findings\n"


@pytest.mark.parametrize(("word", "expected"), table(__file__, "test_the_same_is_there_as_data"))
def test_the_same_is_there_as_data(word, expected):
    document = json.loads(run(word, "-o", "json").output)
    meaning = next(each for each in document["meanings"] if each["is"] == expected["is"])
    assert {name: meaning[name] for name in expected} == expected
    assert document["word"] == word


def test_the_list_is_there_as_data():
    listed = json.loads(run("-o", "json").output)["findings"]
    assert {each["id"] for each in listed} == {*(rule.id for rule in RULES), *entries()}


def test_all_findings_are_listed_by_topic():
    listed = run().output
    for identifier in (*(rule.id for rule in RULES), *entries()):
        assert f" {identifier} " in listed
    assert listed.startswith("wrapping\n  error   wrap-class-list-empty")
    assert "\nbase model: files\n  error   model-directory-missing" in listed
