"""An edited text reads as wanted; its comments, its layout and the other documents stay."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_cli import edit_yaml
from finetune_cli.documents import DocumentError, read_documents
from finetune_cli.edit_yaml import edit_document
from tests.support.cases import table
from tests.support.examples import examples
from tests.unit.finetune_cli.manifests import Quoted

VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "a", "2e-4", "yes", "null", "é: [", "x\ny", "#"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["k", "l", "m: n", "1"]), inner, max_size=3)
    ),
    max_leaves=8,
)

EXAMPLES = sorted(Path("examples").rglob("*.yaml"))
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "c", "2e-4", "on"]), VALUES, min_size=1, max_size=4)


@settings(max_examples=examples(80, 400), deadline=None)
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
    found = [document.content for document in read_documents(edit_document(text, place + 1, wanted))]
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


@settings(max_examples=examples(80, 400), deadline=None)
@given(TREES.filter(bool), TREES.filter(bool))
def test_comments_stay_with_the_entries_that_stay(before: dict[str, Any], after: dict[str, Any]) -> None:
    text = f"{commented(before)}# end\n"
    found = edit_document(text, 1, after)
    assert read_documents(found)[0].content == after
    lines = [line.strip() for line in found.splitlines()]
    for path, key in lasting(before, after):
        place = lines.index(f"# above {path}")
        entry = next(line for line in lines[place + 1 :] if not line.startswith("#"))
        assert entry.partition(":")[0] == key
        assert f"# behind {path}" in entry
    assert lines[-1] == "# end"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_stays_byte_for_byte(path: Path) -> None:
    text = path.read_text()
    for document in read_documents(text):
        assert edit_document(text, document.number, document.content) == text


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 26


@pytest.mark.parametrize(("old", "value", "new"), table(__file__, "test_a_new_value_does_not_take_the_quotes_of_the_old_one"))
def test_a_new_value_does_not_take_the_quotes_of_the_old_one(old: str, value: Any, new: str) -> None:
    text = f"source: pvc://data/a.jsonl  # behind\n{old}\nname: 'b'\n"
    wanted = {"source": "pvc://data/a.jsonl", "epochs": value, "name": "b"}
    assert edit_document(text, 1, wanted) == text.replace(old, new)


@pytest.mark.parametrize(
    "text", ["a:\n- 1\n- b: 2\n", "a:\n    b:\n      - 1\n", "a:\n  -   b: 1\n      c: 2\n", "a: 1\r\nb:\r\n  c: 2\r\n"]
)
def test_the_indentation_and_the_line_ends_of_the_file_are_used(text: str) -> None:
    line_end = "\r\n" if "\r" in text else "\n"
    assert edit_document(text, 1, {**read_documents(text)[0].content, "new": 1}) == f"{text}new: 1{line_end}"


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


@pytest.mark.parametrize(
    "text", [STYLES, "  a: 1\n  b:\n      - 2\n", "--- !!map\na: &x [1, 010]\nb: *x\n", '{"a": 1,\n "b": 2}']
)
def test_what_no_edit_touches_stays(text: str) -> None:
    (document,) = read_documents(text)
    found = edit_document(text, 1, {**document.content, "new": "2e-4"})
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
        edit_document(text, 1, {"a": 1})


def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """A fix never sets null."""
    return {
        key: without_nulls(inner) if isinstance(inner, dict) else inner for key, inner in value.items() if inner is not None
    } or {"a": 1}
