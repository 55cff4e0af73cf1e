"""Files of each kind give the same records; damaged ones give what was whole and say what is not."""

import json
import tracemalloc
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_job.api.inputs import DataFormat
from finetune_trainer.data import read_json
from finetune_trainer.data.read import NoRecordFilesError, can_be_parted, lines_before, read_file, read_records, record_files
from finetune_trainer.data.records import Record, RecordProblem
from tests.unit.finetune_trainer.data.record_files import CHATS, PAIRS, write

CHAT, PAIR, TEXT = DataFormat.CHAT, DataFormat.PROMPT_COMPLETION, DataFormat.TEXT


class StartsWith(str):
    """Equal to what begins with it."""

    __slots__ = ()

    def __eq__(self, other):
        return other.startswith(str(self))

    __hash__ = str.__hash__


def said(item):
    return item.completion if isinstance(item, Record) else f"{item.line}: {item.reason}"


def contents(items):
    """Records without their places."""
    items = list(items)
    assert all(isinstance(item, Record) for item in items), items
    return [(item.prompt, item.completion, item.messages, item.tools) for item in items]


@pytest.mark.parametrize("name", ["data", "data.jsonl", "data.ndjson", "data.json", "data.csv", "data.parquet", "data.JSON"])
def test_pairs_are_the_same_from_any_kind_of_file(tmp_path, name):
    path = write(tmp_path / name.lower(), PAIRS).rename(tmp_path / name)
    records = list(read_file(path, PAIR))
    assert contents(records) == [(pair["prompt"], pair["completion"], (), ()) for pair in PAIRS]
    assert {record.file for record in records} == {path}


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet"])
def test_chats_are_the_same_from_any_kind_of_file_that_can_hold_them(tmp_path, name):
    records = list(read_file(write(tmp_path / name, CHATS), CHAT))
    assert contents(records) == [("", "", tuple(chat["messages"]), tuple(chat["tools"] or ())) for chat in CHATS]


def test_tools_may_be_json_in_a_text(tmp_path):
    path = write(tmp_path / "data.jsonl", [{**CHATS[1], "tools": json.dumps(CHATS[1]["tools"])}])
    assert contents(read_file(path, CHAT))[0][3] == tuple(CHATS[1]["tools"])


def test_places_are_lines_positions_and_rows(tmp_path):
    def places(name):
        return [(record.line, record.unit) for record in read_file(write(tmp_path / name, PAIRS), PAIR)]

    assert places("data.jsonl") == [(1, "line"), (2, "line"), (3, "line")]
    assert places("data.json") == [(1, "record"), (2, "record"), (3, "record")]
    assert places("data.parquet") == [(1, "row"), (2, "row"), (3, "row")]
    assert places("data.csv") == [(2, "line"), (5, "line"), (6, "line")]


def test_a_directory_is_its_known_files_in_order(tmp_path):
    for name in ("b.jsonl", "a/z.json", "a/y.csv", "c.d/x.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, PAIRS)
    for name in ("README.md", ".hidden.jsonl", "a/LICENSE"):
        (tmp_path / name).write_text("no record")
    (tmp_path / ".git").mkdir()
    write(tmp_path / ".git/x.jsonl", PAIRS)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "b.jsonl")
    names = ["a/y.csv", "a/z.json", "b.jsonl", "c.d/x.parquet", "link.jsonl"]
    assert record_files(tmp_path) == [tmp_path / name for name in names]
    assert len(list(read_records(tmp_path, PAIR))) == 5 * len(PAIRS)


def test_a_directory_without_a_known_file_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no record")
    with pytest.raises(NoRecordFilesError, match=r"holds no \.jsonl"):
        record_files(tmp_path)
    with pytest.raises(FileNotFoundError):
        record_files(tmp_path / "none")


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
def test_a_damaged_list_gives_what_is_whole_and_says_where_it_breaks(tmp_path, content, found):
    path = tmp_path / "data.json"
    path.write_bytes(content.encode())
    assert [said(item) for item in read_file(path, TEXT)] == [StartsWith(text) for text in found]
    assert all(item.fix for item in read_file(path, TEXT) if isinstance(item, RecordProblem))


def test_bytes_that_are_not_utf8_spoil_one_record_of_a_list_or_table(tmp_path):
    path = tmp_path / "data.json"
    path.write_bytes(b'[{"text": "a"}, {"text": "\xff"}, {"text": "b"}]')
    assert [said(item) for item in read_file(path, TEXT)] == ["a", "2: is not UTF-8", "b"]
    path = tmp_path / "data.csv"
    path.write_bytes(b"text\na\n\xff\nb\n")
    assert [said(item) for item in read_file(path, TEXT)] == ["a", "3: is not UTF-8", "b"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", []),
        ("prompt,completion\n", []),
        ("\ufeffprompt,completion\r\np,c\r\n\r\n", ["c"]),
        ("id,completion, prompt\n1,c,p\n", ["c"]),
        ("prompt,answer\np,c\n", ["1: is missing"]),
        ("prompt,completion,completion\np,c,d\n", ["1: is the name of more than one column"]),
        ("prompt,completion\np\np,c\np,c,d\n", ["2: has 1 values, the header has 2", "c", "4: has 3 values"]),
        ("prompt,completion\np,\np,c\n", ["2: is empty", "c"]),
        ('prompt,completion\np,"c"d\np,c\n', ["2: is not CSV", "c"]),
        ('prompt,completion\np,"c\np,c\n', ["2: is not CSV"]),
    ],
)
def test_a_damaged_table_gives_what_is_whole_and_says_which_line_is_wrong(tmp_path, content, found):
    path = tmp_path / "data.csv"
    path.write_bytes(content.encode())
    assert [said(item) for item in read_file(path, PAIR)] == [StartsWith(text) for text in found]


@pytest.mark.parametrize("extension", ["jsonl", "json", "parquet"])
def test_keys_that_are_null_and_calls_that_are_none_are_absent(tmp_path, extension):
    call = {"function": {"name": "add", "arguments": {"a": None}}}
    turns = [
        {"role": "user", "content": "q", "tool_calls": None, "thinking": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "thinking": None},
        {"role": "assistant", "content": "a", "tool_calls": [], "thinking": "t"},
    ]
    (record,) = read_file(write(tmp_path / f"data.{extension}", [{"messages": turns}]), CHAT)
    if extension == "parquet":  # which cannot tell a null from an absent key
        call["function"]["arguments"] = {}
    assert record.messages == (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "a", "thinking": "t"},
    )


def test_prompts_that_are_turns_of_a_chat_name_the_format_that_holds_them(tmp_path):
    turns = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    (problem,) = read_file(write(tmp_path / "data.jsonl", [turns]), PAIR)
    assert (problem.key, problem.reason) == ("prompt", "is a list, not a text")
    fix = "join prompt and completion into one list, 'messages', and set spec.data.format: Chat and spec.data.lossOn: Completion"
    assert problem.fix == fix


def test_a_table_holds_no_chats(tmp_path):
    (problem,) = read_file(write(tmp_path / "data.csv", PAIRS), CHAT)
    assert "cannot hold chats" in problem.reason
    assert "JSON Lines" in problem.fix


@pytest.mark.parametrize("cut", [0, 3, 40, -1, -200])
def test_a_damaged_parquet_file_is_a_problem(tmp_path, cut):
    path = write(tmp_path / "data.parquet", PAIRS)
    path.write_bytes(path.read_bytes()[:cut])
    *_, problem = read_file(path, PAIR)
    assert "cannot be read" in problem.reason


def test_parquet_of_other_columns_or_types_is_a_problem(tmp_path):
    (problem,) = read_file(write(tmp_path / "a.parquet", [{"prompt": "p", "answer": "c"}]), PAIR)
    assert (problem.key, problem.reason) == ("completion", "is missing")
    (problem,) = read_file(write(tmp_path / "b.parquet", [{"prompt": "p", "completion": 3}]), PAIR)
    assert (problem.key, problem.unit) == ("completion", "row")


@pytest.mark.parametrize(
    ("messages", "key", "reason"),
    [
        ("hello", "messages", "is a text, not a list"),
        ([], "messages", "is empty"),
        (["hello"], "messages[0]", "is a text, not an object"),
        ([{"content": "q"}], "messages[0].role", "is missing"),
        ([{"from": "human", "value": "q"}], "messages[0].role", "is missing"),
        ([{"role": 3, "content": "q"}], "messages[0].role", "is not the name of a role"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"role": "user", "content": None}], "messages[0].content", "is null, which only a turn with tool_calls may be"),
        ([{"role": "user", "content": [{"type": "text", "text": "q"}]}], "messages[0].content", "is a list, not a text"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}], "messages[1].content", "is empty"),
        ([{"role": "assistant", "content": None, "tool_calls": "f()"}], "messages[0].tool_calls", "is not a list of objects"),
        ([{"role": "user", "content": "\ud800"}], "messages", "is not valid Unicode"),
        ([{"role": "user", "content": "q", "more": {"\udfff": 1}}], "messages", "is not valid Unicode"),
    ],
)
def test_what_is_no_chat_is_named_by_key_and_reason(tmp_path, messages, key, reason):
    (problem,) = read_file(write(tmp_path / "data.jsonl", [{"messages": messages}]), CHAT)
    assert problem.key == key
    assert problem.reason.startswith(reason)
    assert problem.fix


@pytest.mark.parametrize("tools", ["no json", 3, ["f"], {"f": 1}])
def test_tools_that_are_no_list_of_objects_are_a_problem(tmp_path, tools):
    (problem,) = read_file(write(tmp_path / "data.jsonl", [{**CHATS[0], "tools": tools}]), CHAT)
    assert problem.key == "tools"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    record = {"prompt": "p" * 500, "completion": "c" * 1500}
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        table = pa.Table.from_pylist([record | {"completion": f"{number:01500}"} for number in range(10_000)])
        pq.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False)
    else:
        write(path, [record] * 10_000)
    assert path.stat().st_size > 15_000_000
    next(iter(read_file(path, PAIR)))  # what is imported on first use is not the file's
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_file(path, PAIR)) == 10_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
