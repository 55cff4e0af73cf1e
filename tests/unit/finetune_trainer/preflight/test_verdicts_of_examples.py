"""Each file of examples/ gets the verdict that its first lines name."""

import re

import pytest
import yaml

from finetune_job.api.job import parse_job
from finetune_job.failures import Outcome
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from finetune_trainer.roles.preflight import run
from tests.unit.finetune_trainer.preflight.conftest import EXAMPLES

REFUSED = sorted((EXAMPLES / "refused").glob("*.yaml"))
SHOWN = [EXAMPLES / "quickstart.yaml", EXAMPLES / "quickstart-cluster.yaml"]


def announced(path):
    """verdict, gate and finding from the comments at the head of a file."""
    return dict(re.findall(r"^# (verdict|gate|finding): (.+)$", path.read_text(), re.MULTILINE))


def verdict(path, context):
    """The gate that speaks first, and everything that it finds."""
    document = yaml.safe_load(path.read_text())
    findings = evaluate(RuleContext(parse_job(document).spec))
    names = {finding.rule for finding in findings}
    if any(finding.severity == "error" for finding in findings):
        return "refused", "rules", names
    result = run(context(document=document))
    if result.outcome is Outcome.REFUSED:
        return "refused", "preflight", {finding.rule for finding in result.findings}
    return ("accepted with warnings", "rules", names) if names else ("accepted", None, set())


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_the_verdict_is_what_the_file_announces(path, context):
    expected = announced(path)
    found, gate, names = verdict(path, context)
    assert (found, gate) == (expected["verdict"], expected.get("gate"))
    assert names >= ({expected["finding"]} if "finding" in expected else set())


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_the_table_says_the_same_as_the_file(path):
    expected = announced(path)
    (row,) = [line for line in (EXAMPLES / "refused" / "README.md").read_text().splitlines() if f"({path.name})" in line]
    assert f"| {expected['verdict']} |" in row
    assert expected.get("finding", "") in row


def test_each_case_is_shown_for_both_versions():
    cases = {path.stem.rsplit("-", 1)[0] for path in REFUSED}
    assert {path.stem for path in REFUSED} == {f"{case}-fsdp{version}" for case in cases for version in (1, 2)}


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_the_quick_starts_pass_every_rule(path):
    assert evaluate(RuleContext(parse_job(yaml.safe_load(path.read_text())).spec)) == ()
