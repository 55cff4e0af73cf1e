from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.validate import Outcome, validate
from finetune_cli.documents import read_documents
from finetune_cli.exit_codes import ExitCode
from tests.unit.cli.manifests import ACCEPTED, CLAIM, PROFILE, REFUSED, WARNED


def run(*arguments: str, stdin: str = ""):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def findings(text: str, profile: str | None = None) -> dict[str, tuple[str, str, str]]:
    """field -> value, reason, fix"""
    return {
        finding.field: (finding.value, finding.message, finding.fix)
        for verdict in validate(text, profile).verdicts
        for finding in verdict.findings
    }


def edited(path: str, value: object) -> str:
    document = yaml.safe_load(ACCEPTED)
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return yaml.safe_dump(document)


REFUSED_TEXT = """\
FineTuneJob tuned: refused

  error: wrap-class-name-blank
    field:  spec.parallelism.fsdp.transformerLayerClsToWrap
    value:  [""]
    reason: a blank name matches no class: it is skipped in silence, and a list of blank names wraps
            no layer at all
    fix:    leave the field out, or name the classes, as in [LlamaDecoderLayer]
"""

ACCEPTED_TEXT = """\
FineTuneJob tuned: accepted

  Left open by the manifest, and chosen:
    model.attention  """


def test_text_of_a_refused_job():
    result = run("validate", "-f", "-", stdin=REFUSED)
    found, separator, source = result.output.partition("    source: ")
    assert found + separator == f"{REFUSED_TEXT}    source: "
    assert source.startswith("reproduced by")
    assert "tests/pitfalls/test_wrapping.py" in source
    assert "peft/utils/other.py" in source
    assert result.exit_code == ExitCode.REFUSED == 1


def test_text_of_an_accepted_job_shows_what_was_chosen():
    result = run("validate", "-f", "-", stdin=ACCEPTED)
    assert result.exit_code == ExitCode.DONE == 0
    assert result.output.startswith(ACCEPTED_TEXT)
    lines = [line.split() for line in result.output.splitlines()]
    assert ["training.microBatchSize", "8"] in [line[:2] for line in lines]
    assert ["method.lora.targetModules", '["all-linear"]'] in [line[:2] for line in lines]


def test_warnings_are_shown_and_accepted():
    result = run("validate", "-f", "-", stdin=WARNED)
    assert result.exit_code == 0
    assert "warning: no-effect-use-orig-params" in result.output


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_programs_can_read_the_answer(form, read):
    result = run("validate", "-f", "-", "-o", form, stdin=REFUSED)
    answer = read(result.output)
    assert result.exit_code == 1
    assert answer["accepted"] is False
    (document,) = answer["documents"]
    assert document["outcome"] == "refused"
    assert document["findings"][0]["changes"] == [{"field": "spec.parallelism.fsdp.transformerLayerClsToWrap", "value": None}]
    accepted = read(run("validate", "-f", "-", "-o", form, stdin=ACCEPTED).output)["documents"][0]
    assert accepted["plan"]["training"]["micro_batch_size"] == 8
    assert {"field": "spec.data.lossOn", "value": "Completion", "reason": "the prompt is given, not learnt"} in accepted["choices"]


def test_a_file_is_read(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(ACCEPTED)
    assert run("validate", "-f", str(path)).exit_code == 0
    missing = run("validate", "-f", str(tmp_path / "none.yaml"))
    assert missing.exit_code == ExitCode.UNUSABLE == 2
    assert "none.yaml: cannot be read" in missing.output
    path.write_bytes(b"\xff\xfe\x00")
    assert run("validate", "-f", str(path)).exit_code == 2


def test_several_documents_have_several_verdicts():
    report = validate(f"{CLAIM}---\n{ACCEPTED}---\n{REFUSED}---\n{PROFILE}")
    assert [verdict.outcome for verdict in report.verdicts] == [
        Outcome.SKIPPED,
        Outcome.ACCEPTED,
        Outcome.REFUSED,
        Outcome.ACCEPTED,
    ]
    assert report.exit_code is ExitCode.REFUSED
    assert validate(f"{ACCEPTED}---\n---\n{ACCEPTED}").exit_code is ExitCode.DONE
    assert validate(f"{REFUSED}---\nkind: FineTuneJob\n").exit_code is ExitCode.UNUSABLE


def test_the_profile_is_judged_with(tmp_path):
    remote = edited("spec.model.allowRemoteCode", True)
    assert validate(remote).exit_code is ExitCode.DONE
    assert "spec.model.allowRemoteCode" in findings(remote, PROFILE)
    assert "spec.model.allowRemoteCode" in findings(f"{PROFILE}---\n{remote}")
    path = tmp_path / "profile.yaml"
    path.write_text(PROFILE)
    assert run("validate", "-f", "-", "--profile", str(path), stdin=remote).exit_code == 1
    path.write_text(PROFILE.replace("trainerImage", "trainerImages"))
    assert run("validate", "-f", "-", "--profile", str(path), stdin=remote).exit_code == 2


def test_numbers_are_read_as_kubernetes_reads_them():
    bare = edited("spec.training.learningRate", "LATER").replace("LATER", "2e-4")
    assert "must be a string" in findings(bare)["spec.training.learningRate"][1]


@pytest.mark.parametrize(
    ("path", "value", "field", "reason", "fix"),
    [
        ("spec.trainig", {}, "spec.trainig", "there is no such field", "write training"),
        ("spec.training.max_steps", 5, "spec.training.max_steps", "there is no such field", "write maxSteps"),
        (
            "spec.model.zzz",
            1,
            "spec.model.zzz",
            "there is no such field",
            "remove spec.model.zzz; allowed here: allowRemoteCode, attention",
        ),
        ("spec.training.maxSteps", "ten", "spec.training.maxSteps", "should be a valid integer", "write a whole number"),
        ("spec.training.maxSteps", "10", "spec.training.maxSteps", "should be a valid integer", "without quotes"),
        ("spec.training.maxSteps", True, "spec.training.maxSteps", "should be a valid integer", "write a whole number"),
        ("spec.training.maxSteps", 0, "spec.training.maxSteps", "greater than or equal to 1", "Optimizer steps"),
        ("spec.training.maxSteps", float("nan"), "spec.training.maxSteps", "is not a finite number", "write a finite number"),
        ("spec.training.maxSteps", float("inf"), "spec.training.maxSteps", "is not a finite number", "write a finite number"),
        ("spec.training.learningRate", float("-inf"), "spec.training.learningRate", "is not a finite number", "finite"),
        ("spec.training.learningRate", "nan", "spec.training.learningRate", "'nan' is not finite", "write a finite number"),
        ("spec.training.learningRate", "Infinity", "spec.training.learningRate", "is not finite", "write a finite number"),
        ("spec.training.learningRate", 0.001, "spec.training.learningRate", "must be a string", 'write "0.001" in quotes'),
        ("spec.training.learningRate", "fast", "spec.training.learningRate", "is not a number", "write it as in"),
        ("spec.training.learningRate", "-1", "spec.training.learningRate", "is below 0", 'such as "0.05"'),
        ("spec.training.learningRate", -0.5, "spec.training.learningRate", "-0.5 is below 0", 'such as "0.05"'),
        ("spec.training.learningRate", True, "spec.training.learningRate", "is a boolean", "write a number as a string"),
        *(
            ("spec.training.learningRate", text, "spec.training.learningRate", "is not written as numbers are here", "as in")
            for text in ("+1", ".1", "1.", " 1e-4", "1.0e-100", "1_0", "1e-4\n", "\u0661")
        ),
        ("spec.training.maxSteps", 10**20, "spec.training.maxSteps", "is larger than any number", "write a smaller number"),
        ("spec.method.type", "lora", "spec.method.type", "is not one of 'LoRA'", "write LoRA"),
        ("spec.model.dtype", "bf16", "spec.model.dtype", "is not one of 'bfloat16'", "write bfloat16"),
        ("spec.training.precision", "tf32", "spec.training.precision", "is not one of 'bf16'", "write"),
        ("spec.merge.base", "Packed", "spec.merge.base", "is not one of 'Original'", "'Original'"),
        ("spec.data.packing", "yes", "spec.data.packing", "should be a valid boolean", "write true or false"),
        ("spec.method.lora.targetModules", "q_proj", "spec.method.lora.targetModules", "is a text, not a list", "write [q_proj]"),
        ("spec.method.lora.targetModules", "q, v", "spec.method.lora.targetModules", "is a text, not a list", "write [q, v]"),
        ("spec.method.lora.targetModules", {"q": 1}, "spec.method.lora.targetModules", "should be a valid array", "write a list"),
        ("spec.method.lora.targetModules", ["q", 3], "spec.method.lora.targetModules[1]", "should be a valid string", "quotes"),
        ("spec.model", "pvc://models/base", "spec.model", "should be an object", "write a mapping"),
        ("spec.model.source", "file:///srv/model", "spec.model.source", "does not match", "pvc://<claim>/<path>"),
        ("spec.model.source", "pvc://models/../x", "spec.model.source", "leaves its root", "write a path without"),
        ("metadata.name", "Not_A_Name", "metadata.name", "does not match", ""),
        ("apiVersion", "finetune.dev/v1", "apiVersion", "is not one of", "finetune.dev/v1alpha1"),
    ],
)
def test_one_clear_finding_for_each_wrong_field(path, value, field, reason, fix):
    found = findings(edited(path, value))
    assert set(found) == {field}
    assert found[field][0]
    assert reason in found[field][1]
    assert fix in found[field][2]
    assert validate(edited(path, value)).exit_code is ExitCode.UNUSABLE


def test_a_missing_field_is_named_with_its_meaning():
    document = yaml.safe_load(ACCEPTED)
    del document["spec"]["workspace"], document["spec"]["model"]["source"]
    found = findings(yaml.safe_dump(document))
    assert found["spec.workspace"][:2] == ("unset", "is required")
    assert "pvc://<claim>/<path>" in found["spec.model.source"][2]


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("", "file", "holds no document"),
        ("# nothing\n---\n", "file", "holds no document"),
        ("a: [1, 2\nb: 3\n", "line", "expected"),
        ("a: 1\n\tb: 2\n", "line 2", "found"),
        ("a: \x00\n", "file", "characters are not allowed"),
        ("just text", "document", "is not an object"),
        ("[1, 2]", "document", "is not an object"),
        ("a: 1\n", "kind", "is required"),
        ("kind:\n", "kind", "is required"),
        ("kind: List\nitems: []\n", "kind", "is not FineTuneJob"),
        (CLAIM, "kind", "is not FineTuneJob"),
        (ACCEPTED.replace("kind: FineTuneJob", "kind: PyTorchJob"), "kind", "is not FineTuneJob"),
        ("kind: FineTuneJob\nkind: FineTuneJob\n", "kind", "the key is given twice"),
        (ACCEPTED.replace("    maxSteps: 10\n", "    maxSteps: 10\n    maxSteps: 20\n"), "maxSteps", "the key is given twice"),
        ("1: one\n", "line 1", "keys must be text"),
        ("a: &a [*a]\n", "line", "recursive"),
        ("a: " + "[" * 100 + "]" * 100, "line 1", "nested deeper"),
        ("a: " + "[" * 50_000, "", ""),
        ("a: !!python/object/apply:os.system [ls]\n", "line", "could not determine a constructor"),
    ],
)
def test_unusable_input_is_told_in_one_finding(text, field, reason):
    report = validate(text)
    (verdict,) = report.verdicts
    (finding,) = verdict.findings
    assert verdict.outcome is Outcome.UNUSABLE
    assert report.exit_code is ExitCode.UNUSABLE
    assert (finding.rule, finding.severity) == ("unreadable", "error")
    assert finding.field.startswith(field)
    assert reason in finding.message
    assert finding.fix


def listed(*texts: str, kind: str = "List") -> str:
    """As `kubectl get --output yaml` writes several objects."""
    return yaml.safe_dump({"apiVersion": "v1", "kind": kind, "items": [yaml.safe_load(text) for text in texts]})


@pytest.mark.parametrize(
    "text", [listed(ACCEPTED, CLAIM, REFUSED), f"{ACCEPTED}---\n{listed(CLAIM, REFUSED, kind='FineTuneJobList')}"]
)
def test_the_objects_of_a_list_are_judged_like_documents(text):
    report = validate(text)
    assert [verdict.outcome for verdict in report.verdicts] == [Outcome.ACCEPTED, Outcome.SKIPPED, Outcome.REFUSED]
    assert report.exit_code is ExitCode.REFUSED
    remote = edited("spec.model.allowRemoteCode", True)
    assert validate(listed(PROFILE, remote)).exit_code is ExitCode.REFUSED


def test_the_profile_is_found_beside_other_objects_and_is_one():
    remote = edited("spec.model.allowRemoteCode", True)
    for profile in (f"{CLAIM}---\n{PROFILE}", listed(PROFILE), PROFILE):
        assert validate(remote, profile).exit_code is ExitCode.REFUSED
    report = validate(remote, f"{PROFILE}---\n{PROFILE.replace('default', 'other')}")
    assert report.exit_code is ExitCode.UNUSABLE
    assert report.verdicts[0].findings[0].message == "holds 2 objects that could be the FineTuneProfile"


def test_a_generated_name_is_a_name():
    """`kubectl create` takes such manifests, and the API server makes the name before it judges."""
    report = validate(ACCEPTED.replace("name: tuned", "generateName: tune-"))
    assert [(verdict.outcome, verdict.name) for verdict in report.verdicts] == [(Outcome.ACCEPTED, "tune-xxxxx")]
    long = validate(ACCEPTED.replace("name: tuned", f"generateName: {'a' * 100}-"))
    assert [len(verdict.name) for verdict in long.verdicts] == [63]
    assert "metadata.name" in findings(ACCEPTED.replace("name: tuned", "generateName: Tune-"))


def test_values_are_shown_as_a_manifest_writes_them():
    written = {"trainableTokenIndices": [7, 7], "rankPattern": {"(q": 4}}
    found = findings(edited("spec.method.lora", written))
    assert found["spec.method.lora.trainableTokenIndices"][0] == "[7, 7]"
    tokens = edited("spec.method", {"type": "LoHa", "settings": {"rankPattern": {"q": "4"}}})
    assert findings(tokens)["spec.method.settings"][0] == 'rankPattern: {q: "4"}'
    (finding,) = validate(edited("spec.model.source", "x" * 70_000)).verdicts[0].findings
    assert len(finding.value) == 100


def test_aliases_cannot_blow_up():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (finding,) = validate("\n".join(lines)).verdicts[0].findings
    assert "more than 100000 values" in finding.message


def test_unusable_input_exits_with_2_in_every_form():
    for form in ("text", "json", "yaml"):
        assert run("validate", "-f", "-", "-o", form, stdin="a: [").exit_code == 2


def test_dates_stay_text():
    assert (
        validate(edited("metadata.labels", {"since": "2026-11-21"}).replace("'2026-11-21'", "2026-11-21")).exit_code
        is ExitCode.DONE
    )


@pytest.mark.parametrize("name", ["quickstart", "quickstart-cluster", "hub", "publish"])
def test_the_examples_that_show_how_are_accepted_without_a_word(name):
    text = (Path(__file__).parents[3] / f"examples/{name}.yaml").read_text()
    for profile in (None, PROFILE):
        report = validate(text, profile)
        assert report.exit_code is ExitCode.DONE
        assert [finding for verdict in report.verdicts for finding in verdict.findings] == []
        assert any(verdict.outcome is Outcome.ACCEPTED for verdict in report.verdicts)


def test_unknown_metadata_is_named_as_kubectl_would():
    typo = ACCEPTED.replace("metadata:\n", "metadata:\n  lables: {a: b}\n")
    assert findings(typo) == {"metadata.lables": ("a mapping", "there is no such field", "write labels")}
    assert findings(ACCEPTED.replace("metadata:\n", "metadata:\n  labels: {a: b}\n  annotations: {c: d}\n")) == {}


def test_a_directory_and_repeated_files_are_judged_together(tmp_path):
    (tmp_path / "a.yaml").write_text(ACCEPTED)
    (tmp_path / "b.yml").write_text(REFUSED)
    (tmp_path / "profile.json").write_text(json.dumps(yaml.safe_load(PROFILE)))
    (tmp_path / "notes.md").write_text("no manifest")
    remote = tmp_path / "remote.txt"
    remote.write_text(edited("spec.model.allowRemoteCode", True))
    result = run("validate", "-f", str(tmp_path), "-f", str(remote), "-o", "json")
    assert result.exit_code == 1
    found = [(Path(each["file"]).name, each["outcome"]) for each in json.loads(result.output)["documents"]]
    assert found == [("a.yaml", "accepted"), ("b.yml", "refused"), ("profile.json", "accepted"), ("remote.txt", "refused")]
    assert "a.yaml: FineTuneJob tuned: accepted" in run("validate", "-f", str(tmp_path)).output
    (tmp_path / "empty").mkdir()
    assert run("validate", "-f", str(tmp_path / "empty")).exit_code == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: !!float\n", "a tag does not fit"),
        ("a: !!binary aGk=\n", "JSON does not have"),
        ("a: !!set {b, c}\n", "JSON does not have"),
        (f"a: 0x{'f' * 5000}\n", "larger than any number"),
        ("a: &a {<<: *a}\n", "recursive"),
        ("<<: 1\n", "a merge key names mappings"),
        ("'': 1\n'': 2\n", "given twice"),
        ("x: " + "{a: " * 5000, "nested deeper"),
    ],
)
def test_what_yaml_has_and_json_has_not_is_refused(text, reason):
    (finding,) = validate(text).verdicts[0].findings
    assert reason in finding.message
    assert finding.field
    assert finding.fix


def test_merge_keys_bring_what_they_name_and_cannot_blow_up():
    (merged,) = read_documents("a: &a {x: 1, y: 2}\nb: {<<: [*a, {x: 3, z: 4}], y: 5}\n")
    assert merged.content["b"] == {"x": 1, "y": 5, "z": 4}
    rows = ["x0: &x0 {" + ", ".join(f"k{n}: 1" for n in range(2000)) + "}"]
    rows += [f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 50)}]}}" for n in range(1, 10)]
    (finding,) = validate("\n".join(rows)).verdicts[0].findings
    assert "100000 values" in finding.message


def test_letters_are_booleans_where_kubernetes_takes_them_for_booleans():
    """`helm template` of Kubernetes' own YAML reader: {y: true, N: false, 0o10: 8}."""
    text = ACCEPTED.replace("    source: pvc://data/train.jsonl\n", "    source: pvc://data/train.jsonl\n    packing: n\n")
    (verdict,) = validate(text).verdicts
    assert verdict.plan is not None
    assert verdict.plan.data.packing is False
    names = ACCEPTED.replace("  parallelism:", "  method: {lora: {targetModules: [Y, 'y']}}\n  parallelism:")
    assert findings(names)["spec.method.lora.targetModules[0]"][0] == "true"
    assert read_documents("{x: 1, y: 2}")[0].content == {"x": 1, "y": 2}
    (octal,) = validate(ACCEPTED.replace("maxSteps: 10", "maxSteps: 0o10")).verdicts
    assert octal.plan is not None
    assert octal.plan.training.max_steps == 8


def test_words_are_numbers_where_kubernetes_takes_them_for_numbers():
    words = "[1:30:00, 010, 2e-4, 1.5e3, .5, 0x1f, 1_000, 5GB, 2026-01-01]"
    (document,) = read_documents(f"a: {words}")
    assert document.content["a"] == ["1:30:00", 8, 0.0002, 1500.0, 0.5, 31, 1000, "5GB", "2026-01-01"]
