"""A document that does not fit the schema: one finding for each wrong field, with its fix."""

import pytest
import yaml

from finetune_cli.checks.validate import DocumentOutcome, validate
from finetune_cli.exit_codes import ExitCode
from tests.support.cases import table
from tests.unit.finetune_cli.manifests import ACCEPTED, edited, findings


@pytest.mark.parametrize(
    ("path", "value", "field", "reason", "fix"), table(__file__, "test_one_clear_finding_for_each_wrong_field")
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


def test_a_generated_name_is_a_name():
    """`kubectl create` takes such manifests, and the API server makes the name before it judges."""
    report = validate(ACCEPTED.replace("name: tuned", "generateName: tune-"))
    assert [(verdict.outcome, verdict.name) for verdict in report.verdicts] == [(DocumentOutcome.ACCEPTED, "tune-xxxxx")]
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


def test_unknown_metadata_is_named_as_kubectl_would():
    typo = ACCEPTED.replace("metadata:\n", "metadata:\n  lables: {a: b}\n")
    assert findings(typo) == {"metadata.lables": ("a mapping", "there is no such field", "write labels")}
    assert findings(ACCEPTED.replace("metadata:\n", "metadata:\n  labels: {a: b}\n  annotations: {c: d}\n")) == {}
