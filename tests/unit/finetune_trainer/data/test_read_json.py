"""JSON, as lines and as a list: read in parts, in blocks, and as far as it is whole."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_job.api.inputs import DataFormat
from finetune_trainer.data import read_json
from finetune_trainer.data.read import can_be_parted, lines_before, read_file
from finetune_trainer.data.records import Record, RecordProblem
from tests.unit.finetune_trainer.data.record_files import PAIRS, StartsWith, said, write

PAIR, TEXT = DataFormat.PROMPT_COMPLETION, DataFormat.TEXT


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_json, "_BLOCK_BYTES", 7)
        yield


LINES = st.lists(
    st.sampled_from(['{"text": "a"}', '{"text": "größer"}', "", "  ", "broken", '{"text": 3}', '{"text": "b"}\r']), max_size=8
)


@settings(max_examples=150, deadline=None)
@given(lines=LINES, ends=st.booleans(), cuts=st.lists(st.integers(0, 130), max_size=4), bom=st.booleans())
def test_parts_that_cover_a_file_give_each_of_its_records_once(tmp_path_factory, lines, ends, cuts, bom):
    content = "\n".join(lines) + ("\n" if ends else "")
    path = tmp_path_factory.getbasetemp() / "parted.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + content.encode())
    size = path.stat().st_size
    edges = sorted({0, size, *(min(cut, size) for cut in cuts)})
    whole = list(read_file(path, TEXT))
    joined = []
    for start, stop in pairwise(edges):
        before = lines_before(path, start)
        joined += [(item.line + before, item) for item in read_file(path, TEXT, (start, stop))]
    assert [line for line, _ in joined] == [item.line for item in whole]
    key = {Record: lambda item: item.completion, RecordProblem: lambda item: (item.key, item.value, item.reason)}
    assert [(type(item), key[type(item)](item)) for _, item in joined] == [(type(item), key[type(item)](item)) for item in whole]


def test_only_json_lines_are_read_in_parts(tmp_path):
    assert can_be_parted(tmp_path / "x.jsonl")
    assert can_be_parted(tmp_path / "x")
    with pytest.raises(ValueError, match="parts"):
        read_file(write(tmp_path / "x.csv", PAIRS), PAIR, (0, 3))


def test_a_line_beyond_all_bounds_is_a_problem_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read_json, "MAX_RECORD_BYTES", 64)
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "b" * 200 + '"}\n{"text": "c"}\n')
    first, problem, last = read_file(path, TEXT)
    assert (first.completion, last.completion, last.line) == ("a", "c", 3)
    assert "longer than 64 bytes" in problem.reason


def test_an_element_that_is_never_closed_ends_the_reading_within_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(read_json, "MAX_RECORD_BYTES", 64)
    monkeypatch.setattr(read_json, "_BYTES_AT_ONCE", 16)
    path = tmp_path / "x.json"
    path.write_text('[{"text": "a"}, {"text": "b}, ' + "{\"text\": 'c'}, " * 100)
    assert [said(item) for item in read_file(path, TEXT)] == ["a", StartsWith("2: is longer than 64 characters")]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=4), below, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.tuples(st.text(min_size=1).filter(str.strip), VALUES), max_size=6),
    at_once=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_a_list_is_read_the_same_however_it_falls_into_blocks(tmp_path_factory, values, at_once, indent, ascii_only):
    path = tmp_path_factory.getbasetemp() / "list.json"
    records = [{"text": text, "more": more} for text, more in values]
    path.write_bytes(json.dumps(records, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_json, "_BYTES_AT_ONCE", at_once)
        assert [record.completion for record in read_file(path, TEXT)] == [text for text, _ in values]


GOOD = '{"text": "a"}'


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", []),
        (" \n", []),
        ("[]", []),
        ("\ufeff[" + GOOD + "]\r\n", ["a"]),
        (f"[{GOOD}, {{'text': 1}}, {GOOD}]", ["a", "2: is not JSON", "a"]),
        (f'[{GOOD}, {{"text": "b" "c"}}, {GOOD}]', ["a", "2: is not JSON", "a"]),
        (f'[{GOOD}, {{"text": NaN}}, {GOOD}]', ["a", "2: is not JSON", "a"]),
        (f"[{GOOD}, 3, null, [1, 2], {GOOD}]", ["a", "2: is a JSON number", "3: is a JSON null", "4: is a JSON list", "a"]),
        (f'[{GOOD}, {{"text": "\\ud800"}}, {GOOD}]', ["a", "2: is not valid Unicode", "a"]),
        (f"[{GOOD}, {GOOD}", ["a", "a", "2: is followed by the end"]),
        (f"[{GOOD}, ", ["a", "2: the file ends before the list does"]),
        (f'[{GOOD}, {{"text": "a', ["a", "2: the file ends within the record"]),
        (f"[{GOOD} {GOOD}]", ["a", "1: is followed by '{'"]),
        (f"[{GOOD},]", ["a", "2: is not JSON"]),
        (f"{GOOD}\n{GOOD}", ["1: the file does not begin with ["]),
        (f"[{GOOD}]{GOOD}", ["a", "1: the file continues"]),
        ("[" * 200_000, ["1: the file ends within"]),
    ],
)
def test_a_damaged_list_yields_its_intact_records_and_the_place_of_the_damage(tmp_path, content, found):
    path = tmp_path / "data.json"
    path.write_bytes(content.encode())
    assert [said(item) for item in read_file(path, TEXT)] == [StartsWith(text) for text in found]
    assert all(item.fix for item in read_file(path, TEXT) if isinstance(item, RecordProblem))
