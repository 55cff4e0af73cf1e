"""YAML as Kubernetes means it: what words mean, what is refused, and what cannot blow up."""

import pytest

from finetune_cli.checks.validate import validate
from finetune_cli.documents import document_text, read_documents
from finetune_cli.exit_codes import ExitCode
from tests.unit.finetune_cli.manifests import ACCEPTED, edited, findings


def test_numbers_are_read_as_kubernetes_reads_them():
    bare = edited("spec.training.learningRate", "LATER").replace("LATER", "2e-4")
    assert "must be a string" in findings(bare)["spec.training.learningRate"][1]


def test_aliases_cannot_blow_up():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (finding,) = validate("\n".join(lines)).verdicts[0].findings
    assert "more than 100000 values" in finding.message


@pytest.mark.parametrize(("letter", "many"), [("a", 1_500_001), ("é", 750_001)])
def test_a_document_has_at_most_as_many_bytes_as_an_object_of_the_api_server(letter: str, many: int) -> None:
    (finding,) = validate(f"a: b\n---\n{letter * many}\n").verdicts[0].findings
    assert (finding.field, finding.message) == ("line 4", "is larger than 1500000 bytes")
    assert read_documents(f"{letter * (many - 9)}\n---\n{letter * (many - 9)}\n")


def test_dates_stay_text():
    assert (
        validate(edited("metadata.labels", {"since": "2026-11-21"}).replace("'2026-11-21'", "2026-11-21")).exit_code
        is ExitCode.DONE
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: !!float\n", "a tag does not fit"),
        ("a: !!binary aGk=\n", "JSON does not have"),
        ("a: !!set {b, c}\n", "JSON does not have"),
        (f"a: 0x{'f' * 5000}\n", "larger than any integer"),
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


@pytest.mark.parametrize(
    "text", ["1e-5", "12345e678", "0123", "0x1f", "1_000", ".5", "yes", "null", "~", "2026-01-01", "a: b", "", "é"]
)
def test_a_text_that_is_written_is_read_as_the_same_text(text: str) -> None:
    (document,) = read_documents(document_text({"value": text, "list": [text]}))
    assert document.content == {"value": text, "list": [text]}
