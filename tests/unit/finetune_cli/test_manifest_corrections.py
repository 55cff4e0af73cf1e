"""A fix with changes works: with them the finding is gone, and no other comes in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.validate import validate
from finetune_cli.corrections import one_pass
from finetune_cli.corrections.foreign import answer
from finetune_cli.corrections.proposals import example
from finetune_cli.corrections.wrong_field import Proposal
from finetune_cli.documents import read_documents
from finetune_job.api.job import FineTuneJob, FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfile
from finetune_job.finding import FieldChange, Finding
from finetune_job.rules.rule import with_changes
from tests.support.cases import table
from tests.unit.finetune_cli.manifests import ACCEPTED, PROFILE, Quoted, edited_document

MISTAKES = table(__file__, "MISTAKES")
"""The commonest mistakes in a manifest, each with its answer."""


def text_of(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=Quoted, sort_keys=False)


def found_in(document: dict[str, Any]) -> list[Finding]:
    return [finding for verdict in validate(text_of(document)).verdicts for finding in verdict.findings]


def at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def assert_fix_works(document: dict[str, Any], finding: Finding) -> dict[str, Any]:
    before = {(each.rule, each.field) for each in found_in(document)}
    fixed = with_changes(document, finding.changes)
    left = found_in(fixed)
    assert (finding.rule, finding.field) not in {(each.rule, each.field) for each in left}, finding
    new = [each for each in left if (each.rule, each.field) not in before and each.severity == "error"]
    # A rule may refuse what is written now, if it has a fix of its own.
    mistakes = [
        each
        for each in new
        if each.rule == "invalid-field" or (finding.is_proposal and each.field == finding.field and not each.changes)
    ]
    assert mistakes == [], finding
    return fixed


@pytest.mark.parametrize(("path", "value", "is_certain", "fix", "written"), MISTAKES)
def test_a_common_mistake_is_answered_and_fixed(path, value, is_certain, fix, written) -> None:
    document = edited_document(path, value)
    found = [each for each in found_in(document) if each.rule == "invalid-field"]
    assert len(found) == 1
    (finding,) = found
    assert finding.field.startswith(path)
    assert finding.fix == fix
    if finding.changes:
        fixed = assert_fix_works(document, finding)
        assert {name: at(fixed, name) for name in written} == written
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=text_of(document))
    if not is_certain:
        assert (result.stdout, result.exit_code) == (text_of(document), 2)
        return
    assert result.exit_code == 0
    (printed,) = read_documents(result.stdout)
    assert {name: at(printed.content, name) for name in written} == written
    assert f"({finding.rule})" in result.stderr


def test_there_are_fifty_of_them() -> None:
    assert len(MISTAKES) >= 50


WRONG = ("", "x y", "/", "a" * 700, "-1", 0, -1, 10**12, 1.5, True, None, [], ["a b"], {}, {"a": {"b": 1}}, [{"a": 1}], ["", 3])


def fields() -> Iterator[str]:
    """Every path of a spec, down to the entries of lists and mappings."""

    def below(schema: dict[str, Any], path: str) -> Iterator[str]:
        schema = next((each for each in schema.get("anyOf", [schema]) if each != {"type": "null"}), schema)
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rpartition("/")[2]]
        yield path
        for name, inner in schema.get("properties", {}).items():
            yield from below(inner, f"{path}.{name}")

    definitions = FineTuneJobSpec.model_json_schema(by_alias=True)["$defs"]
    yield from below(FineTuneJobSpec.model_json_schema(by_alias=True), "spec")


def test_the_fix_of_every_invalid_field_works() -> None:
    tried = 0
    for number, path in enumerate(fields()):
        # Each field meets three of the values, and each kind of field all of them.
        for value in (WRONG[(3 * number + step) % len(WRONG)] for step in range(3)):
            document = edited_document(path, value)
            for finding in [each for each in found_in(document) if each.rule == "invalid-field"]:
                assert not any(sign in finding.message + finding.fix for sign in ("^", "[a-z", "{0,", "pattern")), finding
                if finding.changes:
                    assert_fix_works(document, finding)
                    tried += 1
    assert tried > 120


@pytest.mark.parametrize(
    "path", ["spec", "spec.training", "spec.model", "spec.data", "spec.output", "spec.workspace", "metadata"]
)
def test_a_missing_part_is_answered_with_one_that_is_accepted(path: str) -> None:
    document = with_changes(yaml.safe_load(ACCEPTED), [])
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place[part]
    del place[last]
    (finding,) = found_in(document)
    assert (finding.field, finding.value, finding.message, finding.is_proposal) == (path, "unset", "is required", True)
    assert finding.fix.startswith(f"write {last}: {{")
    assert found_in(assert_fix_works(document, finding)) == []


def test_every_required_field_has_an_example() -> None:
    def models(model: Any, seen: set[Any]) -> set[Any]:
        if isinstance(model, type) and hasattr(model, "model_fields"):
            if model not in seen:
                seen.add(model)
                for info in model.model_fields.values():
                    models(info.annotation, seen)
        else:
            for inner in getattr(model, "__args__", ()):
                models(inner, seen)
        return seen

    required = {
        (model.__name__, info.alias): example(model, info.alias or "")
        for root in (FineTuneJob, FineTuneProfile)
        for model in models(root, set())
        for info in model.model_fields.values()
        if info.is_required()
    }
    assert len(required) > 15
    assert [name for name, value in required.items() if value is None] == []


def test_a_slip_in_the_kind_is_fixed() -> None:
    text = ACCEPTED.replace("kind: FineTuneJob", "kind: FinetuneJob")
    ((finding,),) = (verdict.findings for verdict in validate(text).verdicts)
    assert (finding.field, finding.fix) == ("kind", "write kind: FineTuneJob")
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=text)
    assert (result.stdout, result.exit_code) == (ACCEPTED, 0)


def test_several_mistakes_are_fixed_at_once_and_comments_stay() -> None:
    text = ACCEPTED.replace(
        "    maxSteps: 10\n", '    max_steps: "10"  # short\n    # tried before\n    lr: 2e-4\n    bf16: true\n'
    )
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=text)
    assert result.exit_code == 0
    assert "# tried before" in result.stdout
    training = read_documents(result.stdout)[0].content["spec"]["training"]
    assert training == {"maxSteps": 10, "learningRate": "0.0002", "precision": "bf16"}


def test_a_profile_is_answered_and_left_alone() -> None:
    wrong = PROFILE.replace("spec:\n", "spec:\n  gpu: {memory: 80GB}\n  tolerations: []\n")
    report = validate(f"{wrong}---\n{ACCEPTED}")
    found = {finding.field: finding.fix for verdict in report.verdicts for finding in verdict.findings}
    assert found["spec.gpu.memory"] == "write 80G"
    assert "allowed here: " in found["spec.tolerations"]
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=f"{wrong}---\n{ACCEPTED}")
    assert (result.stdout, result.exit_code) == (f"{wrong}---\n{ACCEPTED}", 2)


PASTED = table(__file__, "PASTED")


def test_a_pasted_configuration_is_answered_in_all_its_fields() -> None:
    """There are more of them than findings of which a hostile manifest has the fixes tried."""
    found = [finding for verdict in validate(PASTED).verdicts for finding in verdict.findings]
    assert len(found) == 21
    assert [finding for finding in found if not finding.changes or finding.is_proposal] == []
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=PASTED)
    assert result.exit_code == 0, result.stderr
    (printed,) = read_documents(result.stdout)
    assert printed.content["metadata"]["name"] == "my-job"
    assert printed.content["spec"] == table(__file__, "PASTED_FIXED")


@pytest.mark.parametrize("steps", ["max_steps: -1", "max_steps: 0", "max_steps: -1.0", "maxSteps: -1", "max_train_steps: -1"])
@pytest.mark.parametrize("epochs", ["num_train_epochs: 3", "epochs: 3", "num_train_epochs: 3.0"])
def test_steps_that_set_nothing_leave_the_length_to_the_epochs(steps: str, epochs: str) -> None:
    text = ACCEPTED.replace("    maxSteps: 10\n", f"    {steps}\n    {epochs}\n")
    found = {finding.field: finding.fix for verdict in validate(text).verdicts for finding in verdict.findings}
    said = "leave it out: 0 and less mean that no steps are set; the length is spec.training.epochs"
    assert found[f"spec.training.{steps.partition(':')[0]}"] == said
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=text)
    assert (result.exit_code, result.stdout) == (0, ACCEPTED.replace("maxSteps: 10", "epochs: 3"))


@pytest.mark.parametrize("steps", ["max_steps: -1", "maxSteps: -1"])
def test_without_steps_and_epochs_one_pass_is_written(steps: str) -> None:
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=ACCEPTED.replace("maxSteps: 10", steps))
    assert (result.exit_code, result.stdout) == (0, ACCEPTED.replace("maxSteps: 10", "epochs: 1"))


MICRO = {"per_device_train_batch_size": 4}
BATCH = ("spec", "training", "globalBatchSize")


@pytest.mark.parametrize(
    ("spec", "is_certain", "total"), table(__file__, "test_an_accumulation_counts_the_ranks_wherever_they_are_written")
)
def test_an_accumulation_counts_the_ranks_wherever_they_are_written(spec: Any, is_certain: bool, total: int) -> None:
    found = answer("gradient_accumulation_steps", 8, spec)
    assert found is not None
    assert (found.edits, found.is_certain) == (((BATCH, total),), is_certain)


@pytest.mark.parametrize(
    ("written", "is_certain", "total"), [("8", True, 32), ("auto", False, 4), (10**400, False, 4), (8.0, True, 32)]
)
def test_an_accumulation_that_is_not_understood_is_for_a_person(written: Any, is_certain: bool, total: int) -> None:
    found = answer("gradient_accumulation_steps", written, {"training": MICRO})
    assert found is not None
    assert (found.edits, found.is_certain) == (((BATCH, total),), is_certain)


@pytest.mark.parametrize("packing", ["packing", "sample_packing", "neat_packing"])
def test_that_packing_leaves_fewer_steps_is_said_where_the_other_tool_does_not_pack(packing: str) -> None:
    unpacked, packed = (answer("gradient_accumulation_steps", 8, spec) for spec in ({}, {packing: True}))
    assert unpacked is not None
    assert packed is not None
    assert (
        unpacked.fix
        == f"{packed.fix}; spec.data.packing: false keeps the number of steps, as sequences then hold one record each"
    )


@pytest.mark.parametrize("place", ["spec", "spec.training", "spec.parallelism"])
def test_ranks_that_are_pasted_anywhere_count_in_the_fix(place: str) -> None:
    document = yaml.safe_load(PASTED)
    del document["spec"]["parallelism"]
    document = with_changes(document, [FieldChange(field=f"{place}.num_gpus", value=8)])
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=text_of(document))
    assert result.exit_code == 0, result.stderr
    spec = read_documents(result.stdout)[0].content["spec"]
    assert (spec["training"]["globalBatchSize"], spec["parallelism"]) == (256, {"processesPerNode": 8})


@pytest.mark.parametrize(
    ("data", "field"), table(__file__, "test_no_fix_that_is_made_unasked_takes_something_away_that_is_written_elsewhere")
)
def test_no_fix_that_is_made_unasked_takes_something_away_that_is_written_elsewhere(data: dict[str, Any], field: str) -> None:
    document = edited_document("spec.data", data)
    (finding,) = [each for each in found_in(document) if each.field == field]
    assert finding.is_proposal
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=text_of(document))
    assert (result.stdout, result.exit_code) == (text_of(document), 2)


@pytest.mark.parametrize(("path", "value", "fixes", "made"), table(__file__, "test_no_two_answers_contradict_each_other"))
def test_no_two_answers_contradict_each_other(path: str, value: Any, fixes: dict[str, str], made: Any) -> None:
    document = edited_document(path, value)
    found = [each for each in found_in(document) if each.rule == "invalid-field"]
    assert {each.field: each.fix for each in found} == fixes
    for finding in found:
        assert_fix_works(document, finding)
    # Of two that differ, one is for a person to choose.
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=text_of(document))
    assert at(read_documents(result.stdout)[0].content, path) == made


def test_another_name_gives_way_to_the_field_itself() -> None:
    document = edited_document("spec.model", "pvc://models/base")
    document["spec"]["base_model"] = "org/name"
    fixes = {each.field: each.fix for each in found_in(document)}
    assert fixes["spec.model"] == "write a mapping of fields to values: {source: pvc://models/base}"
    assert fixes["spec.base_model"] == "remove it, or write spec.model.source: spec.model.source is written already"


def test_of_two_names_for_one_field_the_more_telling_one_is_taken() -> None:
    document = edited_document("spec.model", {"name": "llama", "path": "pvc://models/base"})
    fixes = {each.field: each.fix for each in found_in(document)}
    assert fixes["spec.model.path"] == "write spec.model.source"
    assert fixes["spec.model.name"].startswith("write hubName; then write <org>/<name>")


def test_a_hundred_slips_are_answered_each() -> None:
    document = edited_document("spec.data.datasets", [{"source": "pvc://data/a", "wieght": "2"} for _ in range(64)])
    del document["spec"]["data"]["source"]
    document["spec"]["training"] |= {f"learning_rate{'_' * number}": "2e-4" for number in range(36)}
    assert len([each for each in found_in(document) if each.changes]) == 100


def test_among_very_many_mistakes_only_the_first_are_tried() -> None:
    """A stranger's manifest may have thousands, and each costs a few readings of the whole."""
    document = edited_document("spec.training.seed", 1)
    document["spec"]["training"] |= {f"x{number}": number for number in range(3000)}
    found = found_in(json.loads(json.dumps(document)))
    assert len(found) == 3000
    assert sum(bool(each.changes) for each in found) < 50


def test_odd_names_and_documents_have_an_answer_and_end_nothing() -> None:
    report = validate(ACCEPTED, "- 1\n- 2\n")
    assert [finding.fix for finding in report.verdicts[0].findings] == [
        "write an object with apiVersion, kind, metadata and spec"
    ]
    for name in ("[key]", "a.b", "", "[0]", "x" * 500, "\u00e9"):
        for path in ("spec", "spec.training", "spec.method.lora", "spec.data"):
            document = edited_document(path, at(yaml.safe_load(ACCEPTED), path) or {})
            at(document, path)[name] = {"a": [1]}
            found = found_in(document)
            assert [each.message for each in found] == ["there is no such field"], (name, path)


def test_a_correction_that_the_schema_refuses_is_left_to_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "propose", lambda wrong: Proposal("write -7", ((wrong.place, -7),), is_certain=True))
    (finding,) = found_in(edited_document("spec.training.seed", -1))
    assert (finding.fix, finding.changes, finding.is_proposal) == ("write -7", (), True)
