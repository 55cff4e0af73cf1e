"""`finetune validate --fix`: what is printed is accepted, and what needed no change stands as it was."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.fix import fix
from finetune_cli.checks.validate import DocumentOutcome, validate
from finetune_cli.documents import read_documents
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.rules.book import RULES
from tests.support.cases import table
from tests.support.examples import examples
from tests.unit.finetune_cli.manifests import ACCEPTED, CLAIM, PROFILE, REFUSED, WARNED, Quoted
from tests.unit.finetune_job.rules.manifests import JOB_NAME, manifest
from tests.unit.finetune_job.rules.test_book import MANIFESTS
from tests.unit.finetune_job.rules.test_book_verdicts import CASES

NEEDING_HUMANS = {rule.id for rule in RULES if rule.needs_human}


def run(*arguments: str, stdin: str = ""):
    return CliRunner().invoke(app, ["validate", "-f", "-", *arguments], input=stdin)


def job_text(spec: dict[str, Any], flow: bool | None = False) -> str:
    document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": JOB_NAME}, "spec": spec}
    if flow is None:
        return json.dumps(document, indent=2)
    return yaml.dump(document, Dumper=Quoted, default_flow_style=flow, sort_keys=False)


def test_comments_order_and_layout_stay() -> None:
    result = run("--fix", stdin=table(__file__, "COMMENTED"))
    assert result.stdout == table(__file__, "COMMENTED_FIXED")
    assert result.exit_code == 0
    assert [line.split("(")[1].rstrip(")") for line in result.stderr.splitlines()] == [
        "wrap-class-name-blank",
        "assistant-loss-without-chat",
        "epochs-or-max-steps",
        "no-effect-use-orig-params",
    ]


@pytest.mark.parametrize("text", [ACCEPTED, f"---\n{ACCEPTED}---\n{CLAIM}...\n", f"# x\r\n{ACCEPTED}", ACCEPTED.rstrip()])
def test_a_clean_manifest_is_printed_as_it_is(text: str) -> None:
    result = run("--fix", stdin=text)
    assert (result.stdout_bytes, result.stderr, result.exit_code) == (text.encode(), "", 0)


def test_other_documents_of_the_file_stay() -> None:
    text = f"# head\n{CLAIM}---\n{REFUSED}---\n{WARNED}"
    fixed = run("--fix", stdin=text).stdout
    assert fixed.startswith(f"# head\n{CLAIM}---\n")
    report = validate(fixed)
    assert [verdict.outcome for verdict in report.verdicts] == [
        DocumentOutcome.SKIPPED,
        DocumentOutcome.ACCEPTED,
        DocumentOutcome.ACCEPTED,
    ]
    assert all(not verdict.findings for verdict in report.verdicts)


def test_what_a_person_has_to_weigh_stays_and_is_told() -> None:
    """It may work as it is, and another dropout or another destination would not be what was asked for."""
    method = '  method: {lora: {loraDropout: "0.6"}}\n'
    text = ACCEPTED.replace("  parallelism:", f"{method}  parallelism:").replace(
        "    maxSteps: 10", "    maxSteps: 10\n    epochs: 1"
    )
    result = run("--fix", stdin=text)
    assert result.exit_code == 0
    assert method in result.stdout
    assert result.stderr == "fixed tuned: spec.training.epochs removed (epochs-or-max-steps)\n"
    assert {
        "credentials-without-tls",
        "hub-source-without-revision",
        "learning-rate-unusual",
        "warmup-ratio-unusual",
        "weight-decay-unusual",
        "dropout-unusual",
    } == NEEDING_HUMANS


@pytest.mark.parametrize(
    "training", [{"learningRate": "0.05"}, {"learningRate": "1e-10"}, {"learningRate": "200", "optimizer": "SGD"}]
)
def test_a_rate_that_may_be_meant_stays(training: dict[str, str]) -> None:
    document = yaml.safe_load(ACCEPTED)
    document["spec"]["training"] |= training
    text = yaml.dump(document, Dumper=Quoted)
    result = run("--fix", stdin=text)
    assert (result.stdout, result.exit_code) == (text, 0)
    ((finding,),) = (verdict.findings for verdict in validate(text).verdicts)
    assert finding.rule == "learning-rate-unusual"


@pytest.mark.parametrize(
    ("source", "command"),
    [("hf://org/model", "git ls-remote https://huggingface.co/org/model HEAD"), ("pvc://data/x.jsonl", None)],
)
def test_a_commit_that_only_the_author_knows_is_not_made_up(source: str, command: str | None) -> None:
    text = ACCEPTED.replace("pvc://models/base", source).replace("    maxSteps: 10", "    maxSteps: 10\n    epochs: 1")
    result = run("--fix", stdin=text)
    assert "revision" not in result.stdout
    assert "epochs removed" in result.stderr
    told = " ".join(result.stderr.split())
    assert (result.exit_code, (command or "hub-source-without-revision") in told) == ((1, True) if command else (0, False))


@pytest.mark.parametrize(
    ("written", "printed"), table(__file__, "test_who_names_a_chat_template_has_chats_unless_something_else_is_written")
)
def test_who_names_a_chat_template_has_chats_unless_something_else_is_written(written, printed) -> None:
    document = yaml.safe_load(ACCEPTED)
    document["spec"]["data"] |= written
    result = run("--fix", stdin=yaml.dump(document, Dumper=Quoted))
    assert result.exit_code == 0
    source = {"source": "pvc://data/train.jsonl"}
    assert read_documents(result.stdout)[0].content["spec"]["data"] == source | printed


def test_jobs_in_a_list_are_fixed() -> None:
    objects = [yaml.safe_load(text) for text in (CLAIM, REFUSED, WARNED)]
    text = f"# head\n{CLAIM}---\n{yaml.safe_dump({'apiVersion': 'v1', 'kind': 'List', 'items': objects})}"
    result = run("--fix", stdin=text)
    assert result.stdout.startswith(f"# head\n{CLAIM}---\n")
    assert (result.exit_code, len(result.stderr.splitlines())) == (0, 2)
    report = validate(result.stdout)
    assert [verdict.outcome for verdict in report.verdicts] == [*[DocumentOutcome.SKIPPED] * 2, *[DocumentOutcome.ACCEPTED] * 2]
    assert all(not verdict.findings for verdict in report.verdicts)


def test_several_files_become_one_of_several_documents(tmp_path) -> None:
    for name, text in (("a.yaml", REFUSED), ("b.yml", WARNED), ("notes.txt", "none"), ("c.json", job_text(manifest({}), None))):
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(app, ["validate", "-f", str(tmp_path), "--fix"])
    assert result.exit_code == 0
    assert len(read_documents(result.stdout)) == 3


def test_what_is_no_job_is_left_alone_and_told() -> None:
    broken = ACCEPTED.replace("maxSteps: 10", "maxSteps: ten")
    result = run("--fix", stdin=broken)
    assert (result.stdout, result.exit_code) == (broken, 2)
    assert "spec.training.maxSteps" in result.stderr
    assert run("--fix", stdin="[").exit_code == 2
    assert run("--fix", "-o", "json", stdin=ACCEPTED).exit_code == 2


def test_the_profile_counts(tmp_path) -> None:
    remote = ACCEPTED.replace("    dtype: bfloat16\n", "    dtype: bfloat16\n    allowRemoteCode: true\n")
    assert run("--fix", stdin=remote).stdout == remote
    assert run("--fix", stdin=f"{PROFILE}---\n{remote}").stdout == f"{PROFILE}---\n{ACCEPTED}"


def profile_text(profile: FineTuneProfileSpec | None) -> str | None:
    if profile is None:
        return None
    spec = profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps({"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile", "metadata": {"name": "p"}, "spec": spec})


def assert_fixed(text: str, profile: str | None, rule: str | None = None) -> None:
    found = {finding.rule for verdict in validate(text, profile).verdicts for finding in verdict.findings}
    assert rule in {*found, None}
    (fixed,) = fix([("", text)], profile)
    assert {finding.rule for _, finding in fixed.made} or fixed.text == text
    verdicts = [verdict for verdict in validate(fixed.text, profile).verdicts if verdict.kind == "FineTuneJob"]
    (verdict,) = verdicts
    left = [finding for finding in verdict.findings if finding.rule not in NEEDING_HUMANS]
    is_refused = any(finding.severity == "error" for finding in verdict.findings)
    expected = DocumentOutcome.REFUSED if is_refused else DocumentOutcome.ACCEPTED
    assert (verdict.outcome, left) == (expected, []), fixed.text
    (again,) = fix([("", fixed.text)], profile)
    assert again.text == fixed.text


def test_what_every_rule_finds_is_fixed_in_every_style() -> None:
    for number, (rule, bad, _, profile) in enumerate(CASES):
        assert_fixed(job_text(manifest(bad), (False, True, None)[number % 3]), profile_text(profile), rule)


@settings(max_examples=examples(15, 60), deadline=None)
@given(MANIFESTS, st.sampled_from([False, True, None]))
def test_any_manifest_is_fixed(spec: dict[str, Any], flow: bool | None) -> None:
    assert_fixed(job_text(spec, flow), None)
