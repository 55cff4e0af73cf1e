"""`finetune validate --fix`: what is printed is accepted, and what needed no change stands as it was."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from finetune_cli import edit_yaml
from finetune_cli.app import app
from finetune_cli.checks.fix import fix
from finetune_cli.checks.validate import Outcome, validate
from finetune_cli.documents import DocumentError, Loader, read_documents
from finetune_cli.edit_yaml import edited
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.rules.book import RULES
from tests.unit.cli.manifests import ACCEPTED, CLAIM, PROFILE, REFUSED, WARNED
from tests.unit.rules.manifests import manifest
from tests.unit.rules.test_book import MANIFESTS
from tests.unit.rules.test_verdicts import CASES

COMMENTED = """\
# the whole file
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: tuned}

spec:
  # the base
  model:
    source: pvc://models/base   # small

  data: {source: pvc://data/train.jsonl, lossOn: Assistant, packing: true}  # records
  training:
    epochs: 3   # passes
    # steps
    maxSteps: 10
    learningRate: '2e-4'
  parallelism:
    processesPerNode: 2
    fsdp:
      # layers
      transformerLayerClsToWrap:
        - ""
        - " "
      useOrigParams: true
  output:
    destination: pvc://out/tuned
  workspace: {claimName: workspace}
# the end
"""
COMMENTED_FIXED = """\
# the whole file
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: tuned}

spec:
  # the base
  model:
    source: pvc://models/base   # small

  data: {source: pvc://data/train.jsonl, lossOn: Completion, packing: true} # records
  training:
    # steps
    maxSteps: 10
    learningRate: '2e-4'
  parallelism:
    processesPerNode: 2
    fsdp: {}
  output:
    destination: pvc://out/tuned
  workspace: {claimName: workspace}
# the end
"""


WEIGHED = {rule.id for rule in RULES if rule.is_weighed}


class Quoted(yaml.SafeDumper):
    """Writes what this product reads: 2e-4 is a number, so the text is put in quotes."""


Quoted.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def run(*arguments: str, stdin: str = ""):
    return CliRunner().invoke(app, ["validate", "-f", "-", *arguments], input=stdin)


def job_text(spec: dict[str, Any], flow: bool | None = False) -> str:
    document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "tuned"}, "spec": spec}
    if flow is None:
        return json.dumps(document, indent=2)
    return yaml.dump(document, Dumper=Quoted, default_flow_style=flow, sort_keys=False)


def test_comments_order_and_layout_stay() -> None:
    result = run("--fix", stdin=COMMENTED)
    assert result.stdout == COMMENTED_FIXED
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
    assert [verdict.outcome for verdict in report.verdicts] == [Outcome.SKIPPED, Outcome.ACCEPTED, Outcome.ACCEPTED]
    assert all(not verdict.findings for verdict in report.verdicts)


def test_what_a_person_has_to_weigh_stays_and_is_told() -> None:
    """It works as it is, and another method or another destination would not be what was asked for."""
    method = "  method: {type: VBLoRA}\n"
    text = ACCEPTED.replace("  parallelism:", f"{method}  parallelism:").replace(
        "    maxSteps: 10", "    maxSteps: 10\n    epochs: 1"
    )
    result = run("--fix", stdin=text)
    assert result.exit_code == 0
    assert method in result.stdout
    assert result.stderr == "fixed tuned: spec.training.epochs removed (epochs-or-max-steps)\n"
    assert {"method-in-one-unit", "credentials-without-tls"} == WEIGHED


def test_jobs_in_a_list_are_fixed() -> None:
    objects = [yaml.safe_load(text) for text in (CLAIM, REFUSED, WARNED)]
    text = f"# head\n{CLAIM}---\n{yaml.safe_dump({'apiVersion': 'v1', 'kind': 'List', 'items': objects})}"
    result = run("--fix", stdin=text)
    assert result.stdout.startswith(f"# head\n{CLAIM}---\n")
    assert (result.exit_code, len(result.stderr.splitlines())) == (0, 2)
    report = validate(result.stdout)
    assert [verdict.outcome for verdict in report.verdicts] == [*[Outcome.SKIPPED] * 2, *[Outcome.ACCEPTED] * 2]
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
    left = [finding for verdict in verdicts for finding in verdict.findings if finding.rule not in WEIGHED]
    assert ([verdict.outcome for verdict in verdicts], left) == ([Outcome.ACCEPTED], []), fixed.text
    (again,) = fix([("", fixed.text)], profile)
    assert again.text == fixed.text


def test_what_every_rule_finds_is_fixed_in_every_style() -> None:
    for number, (rule, bad, _, profile) in enumerate(CASES):
        assert_fixed(job_text(manifest(bad), (False, True, None)[number % 3]), profile_text(profile), rule)


@settings(max_examples=40, deadline=None)
@given(MANIFESTS, st.sampled_from([False, True, None]))
def test_any_manifest_is_fixed(spec: dict[str, Any], flow: bool | None) -> None:
    assert_fixed(job_text(spec, flow), None)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "a", "2e-4", "yes", "null", "é: [", "x\ny", "#"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["k", "l", "m: n", "1"]), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "c", "2e-4", "on"]), VALUES, min_size=1, max_size=4)


@settings(max_examples=250, deadline=None)
@given(OBJECTS, OBJECTS, st.sampled_from([False, True, None]), st.integers(0, 2))
def test_an_edited_text_reads_as_wanted_and_its_neighbours_as_before(
    before: dict[str, Any], after: dict[str, Any], flow: bool | None, place: int
) -> None:
    texts = ["x: 1 # one\n", "# two\ny: [2]\n"]
    written = json.dumps(before) + "\n" if flow is None else yaml.dump(before, Dumper=Quoted, default_flow_style=flow)
    texts.insert(place, written)
    text = "---\n".join(texts)
    if [document.content for document in read_documents(text)][place] != before:
        return
    wanted = without_nulls(after)
    found = [document.content for document in read_documents(edited(text, place + 1, wanted))]
    assert json.dumps(found[place], sort_keys=True) == json.dumps(wanted, sort_keys=True)
    others = found[:place] + found[place + 1 :]
    assert others == [{"x": 1}, {"y": [2]}]


def commented(mapping: dict[str, Any], path: str = "", indent: str = "") -> str:
    """A mapping in block style, with a line of comment above each key and one behind it."""
    lines = []
    for key, value in mapping.items():
        here = f"{path}.{key}"
        lines.append(f"{indent}# above {here}\n")
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:  # behind {here}\n", commented(value, here, indent + "  ")]
        elif isinstance(value, list) and value:
            lines.append(f"{indent}{key}:  # behind {here}\n")
            lines += [f"{indent}  # above {here}[{index}]\n{indent}  - {item}\n" for index, item in enumerate(value)]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}  # behind {here}\n")
    return "".join(lines)


def lasting(before: dict[str, Any], after: dict[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Path and key of every entry that an edit leaves in its place."""
    found = []
    for key in before.keys() & after.keys():
        old, new, here = before[key], after[key], f"{path}.{key}"
        found.append((here, key))
        if isinstance(old, dict) and isinstance(new, dict):
            found += lasting(old, new, here)
    return found


TREES = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=2)), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), st.one_of(st.integers(0, 9), inner), max_size=4),
    max_leaves=6,
)


@settings(max_examples=250, deadline=None)
@given(TREES.filter(bool), TREES.filter(bool))
def test_comments_stay_with_the_entries_that_stay(before: dict[str, Any], after: dict[str, Any]) -> None:
    text = f"{commented(before)}# end\n"
    found = edited(text, 1, after)
    assert read_documents(found)[0].content == after
    lines = [line.strip() for line in found.splitlines()]
    for path, key in lasting(before, after):
        place = lines.index(f"# above {path}")
        entry = next(line for line in lines[place + 1 :] if not line.startswith("#"))
        assert entry.partition(":")[0] == key
        assert f"# behind {path}" in entry
    assert lines[-1] == "# end"


EXAMPLES = sorted(Path("examples").rglob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_stays_byte_for_byte(path: Path) -> None:
    text = path.read_text()
    for document in read_documents(text):
        assert edited(text, document.number, document.content) == text


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 26


@pytest.mark.parametrize(
    "text", ["a:\n- 1\n- b: 2\n", "a:\n    b:\n      - 1\n", "a:\n  -   b: 1\n      c: 2\n", "a: 1\r\nb:\r\n  c: 2\r\n"]
)
def test_the_indentation_and_the_line_ends_of_the_file_are_used(text: str) -> None:
    line_end = "\r\n" if "\r" in text else "\n"
    assert edited(text, 1, {**read_documents(text)[0].content, "new": 1}) == f"{text}new: 1{line_end}"


STYLES = """\
%YAML 1.1
--- # first
a:
- 1   # one
-   b: ~
    c: 'it''s'

# gap
d: >-
  folded
  text
e: |+
  kept

f: "g"
...
"""


@pytest.mark.parametrize("text", [STYLES, "  a: 1\n  b:\n      - 2\n", "--- !!map\na: &x [1, 010]\nb: *x\n", '{"a": 1,\n "b": 2}'])
def test_what_no_edit_touches_stays(text: str) -> None:
    (document,) = read_documents(text)
    found = edited(text, 1, {**document.content, "new": "2e-4"})
    assert read_documents(found)[0].content == {**document.content, "new": "2e-4"}
    for kept in ("# first", "# one", "# gap", "'it''s'", "~", ">-", "|+", "&x", "*x", "010"):
        assert (kept in found) == (kept in text), found


@pytest.mark.parametrize(
    "text",
    [
        f"a: {'[' * 65}{']' * 65}\n",
        "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
        + "".join(f"{n}: &{n} [{', '.join([f'*{o}'] * 9)}]\n" for o, n in pairwise("abcdefg")),
        f"a: [{'1, ' * 250_000}1]\n",
        f"a: {'x' * 1_500_000}\n",
        "a: !!python/object/apply:os.getcwd []\n",
    ],
    ids=["deep", "aliases", "values", "long", "tag"],
)
def test_what_exceeds_the_bounds_is_refused_before_it_is_edited(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_yaml.YAML, "load", lambda *_: pytest.fail("reached ruamel"))
    with pytest.raises(DocumentError):
        edited(text, 1, {"a": 1})


def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """A fix never sets null."""
    return {
        key: without_nulls(inner) if isinstance(inner, dict) else inner for key, inner in value.items() if inner is not None
    } or {"a": 1}
