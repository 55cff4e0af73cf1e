"""Every fix works: with the changes of a finding the finding is gone, and no other comes in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.validate import validate
from finetune_cli.corrections.foreign import answer
from finetune_cli.corrections.proposals import example
from finetune_cli.documents import read_documents
from finetune_job.api.job import FineTuneJob, FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfile
from finetune_job.finding import FieldChange, Finding
from finetune_job.rules.rule import with_changes
from tests.unit.finetune_cli.corrections_cases import MISTAKES
from tests.unit.finetune_cli.manifests import ACCEPTED, PROFILE, Quoted, edited_document


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
                assert finding.changes, (path, value, finding)
                assert not any(sign in finding.message + finding.fix for sign in ("^", "[a-z", "{0,", "pattern")), finding
                assert_fix_works(document, finding)
                tried += 1
    assert tried > 300


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


PASTED = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata:
  name: My Job
spec:
  model: {path: pvc://models/base}
  data: {path: pvc://data/chats.jsonl, format: sharegpt}
  method:
    type: lora
    lora: {rank: 16, alpha: 32, dropout: 0.05, target_modules: all-linear}
  training:
    num_train_epochs: 3
    learning_rate: 2e-4
    per_device_train_batch_size: 4
    gradient_accumulation_steps: 8
    warmup_ratio: 0.03
    lr_scheduler_type: cosine
    weight_decay: 0.01
    bf16: true
    report_to: wandb
  parallelism: {gpus: 8}
  output: {path: pvc://out/tuned}
  workspace: {storage: 200GB}
"""


def test_a_pasted_configuration_is_answered_in_all_its_fields() -> None:
    """There are more of them than findings of which a hostile manifest has the fixes tried."""
    found = [finding for verdict in validate(PASTED).verdicts for finding in verdict.findings]
    assert len(found) == 21
    assert [finding for finding in found if not finding.changes or finding.is_proposal] == []
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=PASTED)
    assert result.exit_code == 0, result.stderr
    (printed,) = read_documents(result.stdout)
    assert printed.content["metadata"]["name"] == "my-job"
    assert printed.content["spec"] == {
        "model": {"source": "pvc://models/base"},
        "data": {"source": "pvc://data/chats.jsonl", "format": "Chat", "mapping": {"preset": "ShareGPT"}},
        "method": {"type": "LoRA", "lora": {"r": 16, "loraAlpha": 32, "loraDropout": "0.05", "targetModules": ["all-linear"]}},
        "training": {
            "epochs": 3,
            "learningRate": "0.0002",
            "microBatchSize": 4,
            # Of all eight ranks, though their number had a name of another tool, too.
            "globalBatchSize": 256,
            "warmupRatio": "0.03",
            "scheduler": "Cosine",
            "weightDecay": "0.01",
            "precision": "bf16",
            "trackers": ["wandb"],
        },
        "parallelism": {"processesPerNode": 8},
        "output": {"destination": "pvc://out/tuned"},
        "workspace": {"volumeClaimTemplate": {"storage": "200Gi"}},
    }


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


@pytest.mark.parametrize(
    ("spec", "is_certain", "total"),
    [
        # 4 sequences x 8 ranks x 8 accumulated, wherever the numbers are pasted and however they are written.
        ({"training": MICRO, "parallelism": {"gpus": 8}}, True, 256),
        ({"training": MICRO | {"num_gpus": 8}}, True, 256),
        ({"training": MICRO, "num_gpus": 8}, True, 256),
        ({"training": MICRO, "num_gpus": "8"}, True, 256),
        (MICRO | {"nnodes": 2, "nproc_per_node": 4}, True, 256),
        ({"training": {"microBatchSize": 4}, "parallelism": {"processesPerNode": 8}, "nodes": 1}, True, 256),
        ({"training": MICRO}, True, 32),
        # Whatever is not clear is for a person to say.
        ({"training": MICRO, "num_gpus": "all"}, False, 32),
        ({"training": MICRO, "num_gpus": 8, "parallelism": {"processesPerNode": 2}}, False, 256),
        ({"training": MICRO, "num_processes": 8}, False, 32),
        ({"training": MICRO | {"global_batch_size": 64}}, False, 32),
        ({"training": {"microBatchSize": 4}, "model": {"gpus": 8}}, True, 256),
        ({"parallelism": {"gpus": 8}}, False, 64),
        (MICRO | {"training": {"microBatchSize": 2}}, False, 32),
    ],
)
def test_an_accumulation_counts_the_ranks_wherever_they_are_written(spec: Any, is_certain: bool, total: int) -> None:
    found = answer("gradient_accumulation_steps", 8, spec)
    assert found is not None
    assert (found.changes, found.is_certain) == ({"training.globalBatchSize": total}, is_certain)


@pytest.mark.parametrize(
    ("written", "is_certain", "total"), [("8", True, 32), ("auto", False, 4), (10**400, False, 4), (8.0, True, 32)]
)
def test_an_accumulation_that_is_not_understood_is_for_a_person(written: Any, is_certain: bool, total: int) -> None:
    found = answer("gradient_accumulation_steps", written, {"training": MICRO})
    assert found is not None
    assert (found.changes, found.is_certain) == ({"training.globalBatchSize": total}, is_certain)


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
    ("data", "field"),
    [
        ({"source": "pvc://data/a.jsonl", "format": "sharegpt", "mapping": "x"}, "spec.data.format"),
        ({"source": ["pvc://data/a", "pvc://data/b"], "datasets": {"source": "pvc://data/c"}}, "spec.data.source"),
    ],
)
def test_no_fix_that_is_made_unasked_takes_something_away_that_is_written_elsewhere(data: dict[str, Any], field: str) -> None:
    document = edited_document("spec.data", data)
    (finding,) = [each for each in found_in(document) if each.field == field]
    assert finding.is_proposal
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--fix"], input=text_of(document))
    assert (result.stdout, result.exit_code) == (text_of(document), 2)


@pytest.mark.parametrize(
    ("path", "value", "fixes", "made"),
    [
        (
            "spec.data",
            {"file": "pvc://data/a.jsonl", "dataset": ["pvc://data/b", "pvc://data/c"]},
            {
                "spec.data.file": "write spec.data.source",
                "spec.data.dataset": "remove spec.data.dataset, or take it for spec.data.source in place of spec.data.file",
            },
            {"source": "pvc://data/a.jsonl", "dataset": ["pvc://data/b", "pvc://data/c"]},
        ),
        (
            "spec.workspace",
            {"name": "ws", "size": "10Gi"},
            {
                "spec.workspace.name": "write spec.workspace.claimName and remove spec.workspace.size, if there is such a claim",
                "spec.workspace.size": "write spec.workspace.volumeClaimTemplate.storage and remove spec.workspace.name, if the "
                "claim is to be made",
            },
            {"name": "ws", "size": "10Gi"},
        ),
        (
            "spec.method",
            {"use_dora": True, "load_in_4bit": True},
            {
                "spec.method.use_dora": "write spec.method.type: DoRA",
                "spec.method.load_in_4bit": "remove spec.method.load_in_4bit, or take it for spec.method.type in place of "
                "spec.method.use_dora",
            },
            {"type": "DoRA", "load_in_4bit": True},
        ),
        # Both say the same.
        (
            "spec.method",
            {"adapter": "QLoRA", "load_in_4bit": True},
            {
                "spec.method.adapter": "write spec.method.type",
                "spec.method.load_in_4bit": "write spec.method.type: QLoRA, which packs the base in 4 bits",
            },
            {"type": "QLoRA"},
        ),
    ],
)
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
    assert fixes["spec.base_model"] == "remove spec.base_model, or take it for spec.model.source in place of spec.model"


def test_of_two_names_for_one_field_the_more_telling_one_is_taken() -> None:
    document = edited_document("spec.model", {"name": "llama", "path": "pvc://models/base"})
    fixes = {each.field: each.fix for each in found_in(document)}
    assert fixes["spec.model.path"] == "write spec.model.source"
    assert fixes["spec.model.name"].startswith("write hubName; write <org>/<name>, or remove spec.model.hubName")


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
