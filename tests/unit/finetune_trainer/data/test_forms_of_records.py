"""Data sets as people have them: each is prepared, or refused with a fix that works when it is applied as written."""

import json
from pathlib import Path

import datasets
import pytest
import yaml

from finetune_job.api.inputs import DataFormat
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.finding import FieldChange
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import DataPlan, JobIdentity
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.read import record_files
from finetune_trainer.data.records import example
from finetune_trainer.data.source_files import split_of
from tests.unit.finetune_job.rules.manifests import applied, manifest
from tests.unit.finetune_trainer.data.record_files import write
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer

TOKENIZER = byte_tokenizer(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
ASK, END = "<|im_start|>", "<|im_end|>"
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHAT = f"{ASK}user\nq{END}\n{ASK}assistant\n[a{END}]\n"
ALPACA = [{"instruction": "do", "input": "", "output": "done"}, {"instruction": "add", "input": "1, 2", "output": "3"}]
RENDERED = [{"instruction": "q", "input": "", "output": "a", "text": "# q a"}]
SHARE_GPT = [{"system": "be", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]
PARTS = [{"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "xy"]}, TURNS[1]]}]
PAIRS = [{"question": "q", "answer": "a"}]
DOLLY = [
    {"instruction": "who", "context": "the book", "response": "X", "category": "qa"},
    {"instruction": "why", "context": "", "response": "so", "category": "qa"},
]
RATED = [{"prompt": "q", "completion": "a", "label": True}, {"prompt": "q", "completion": "b", "label": False}]
PREFERENCES = [{"prompt": "q", "chosen": "good", "rejected": "bad"}]


def save(records):
    def saved(path: Path) -> None:
        datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(records), "test": datasets.Dataset.from_list([{"text": "held"}])}
        ).save_to_disk(str(path))

    return saved


def hub(path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        (path / "data").mkdir(parents=True, exist_ok=True)
        write(path / "data" / f"{name}.parquet", [{"text": name}])
    (path / "README.md").write_text("---\n")


def claim(tmp_path: Path, name: str, data) -> Path:
    """A claims root whose claim `data` holds `name`: records, a text, or what a function makes there."""
    (tmp_path / "data").mkdir(exist_ok=True)
    TOKENIZER.save_pretrained(tmp_path / "models")
    path = tmp_path / "data" / name
    if callable(data):
        data(path)
    elif isinstance(data, str):
        path.write_text(data)
    else:
        write(path, data)
    return tmp_path


def spec_of(name: str, data) -> dict:
    return manifest({"data": {"source": f"pvc://data/{name}", **data}})


def errors(spec: dict):
    return [each for each in evaluate(RuleContext(FineTuneJobSpec.model_validate(spec))) if each.severity == "error"]


def resolved(spec: dict) -> DataPlan:
    assert errors(spec) == []
    return resolve(JobIdentity(namespace="", name="j", uid=""), FineTuneJobSpec.model_validate(spec), None).data


def found_in(root: Path, spec: dict):
    with prepare(resolved(spec), root, root / "models", TOKENIZER, root / "prepared", num_workers=0) as preparation:
        return [finding for finding in preparation.findings if finding.severity == "error"]


def learnt(root: Path, spec: dict) -> list[str]:
    """The documents in order, what is supervised in brackets."""
    from finetune_trainer.data.file_parts import FilePart, PartResult, PartSettings, PartTask, _batches
    from finetune_trainer.data.sources import list_sources
    from finetune_trainer.data.tokenize import tokenize

    plan, made = resolved(spec), []
    for source in list_sources(plan, root):
        for path in source.files:
            part = FilePart(0, path, None, 0)
            settings = PartSettings(plan)
            for batch in _batches(PartTask(part, settings, None), PartResult()):
                made += tokenize(TOKENIZER, batch, plan.loss_on, plan.chat_template)
    texts = []
    for document in made:
        text, before = "", False
        for token, now in zip(document.input_ids, document.supervised, strict=True):
            text += ("[" if now else "]") * (now != before) + TOKENIZER.decode([token])
            before = now
        texts.append(text + "]" * before)
    return texts


CHATS = {"format": "Chat", "chatTemplate": "ChatML"}
FORMS = {
    # name of the file, what it holds, the manifest that a newcomer writes, finding, what is learnt in the end
    "chat": ("a.jsonl", [{"messages": TURNS}], CHATS, None, [CHAT]),
    "parts": ("a.jsonl", PARTS, CHATS, None, [CHAT.replace("user\nq", "user\nx\ny")]),
    "alpaca": ("a.json", ALPACA, {}, "data-record-invalid", [f"do\n[done{END}]", f"add\n1, 2\n[3{END}]"]),
    "alpaca as chats": ("a.json", ALPACA[:1], CHATS, "data-record-invalid", [CHAT.replace("user\nq", "user\ndo").replace("[a", "[done")]),
    "Alpaca with a rendered text": ("a.jsonl", RENDERED, {}, "data-record-invalid", [f"q\n[a{END}]"]),
    "Alpaca with a rendered text as chats": ("a.jsonl", RENDERED, CHATS, "data-record-invalid", [CHAT]),
    "Alpaca with a rendered text as texts": ("a.jsonl", RENDERED, {"format": "Text"}, None, [f"#[ q a{END}]"]),
    "Alpaca with a rendered prompt": ("a.jsonl", [{"instruction": "q", "input": "", "output": "a", "prompt": "# q", "completion": "a"}], CHATS, "data-record-invalid", [CHAT]),
    "question and answer with a rendered text": ("a.jsonl", [{"question": "q", "answer": "a", "text": "# q a"}], CHATS, "data-record-invalid", [CHAT]),
    "a text with a label": ("a.jsonl", [{"text": "t", "source": "web", "target": 1}], {}, "data-record-invalid", [f"t[{END}]"]),
    "share-gpt as nobody configures it": ("a.jsonl", SHARE_GPT, {}, "data-record-invalid", [f"{ASK}system\nbe{END}\n{CHAT}"]),
    "share-gpt as chats": ("a.jsonl", SHARE_GPT, CHATS, "data-record-invalid", [f"{ASK}system\nbe{END}\n{CHAT}"]),
    "share-gpt in Parquet": ("a.parquet", SHARE_GPT, CHATS, "data-record-invalid", [f"{ASK}system\nbe{END}\n{CHAT}"]),
    "share-gpt with roles of other names": ("a.jsonl", [{"conversations": [{"from": "Human", "value": "q"}, {"from": "bot", "value": "a"}]}], {}, "data-record-invalid", [CHAT]),
    "turns of two sides": ("a.jsonl", [{"prompt": TURNS[:1], "completion": TURNS[1:]}], CHATS, None, [CHAT]),
    "turns of two sides as pairs": ("a.jsonl", [{"prompt": TURNS[:1], "completion": TURNS[1:]}], {}, "data-record-invalid", [CHAT]),
    "turns and a text": ("a.jsonl", [{"prompt": TURNS[:1], "completion": "a"}], CHATS, None, [CHAT]),
    "turns and a text as pairs": ("a.jsonl", [{"prompt": TURNS[:1], "completion": "a"}], {}, "data-record-invalid", [CHAT]),
    "turns and a text as texts": ("a.jsonl", [{"prompt": TURNS[:1], "completion": "a"}], {"format": "Text"}, "data-record-invalid", [CHAT]),
    "turns and a text in Parquet": ("a.parquet", [{"prompt": TURNS[:1], "completion": "a"}], CHATS, None, [CHAT]),
    "a text and turns": ("a.jsonl", [{"prompt": "q", "completion": TURNS[1:]}], CHATS, None, [CHAT]),
    "turns and a text of another name": ("a.jsonl", [{"prompt": TURNS[:1], "answer": "a", "id": "1"}], CHATS, "data-record-invalid", [CHAT]),
    "turns and a text of another name in Parquet as pairs": ("a.parquet", [{"question": TURNS[:1], "answer": "a"}], {}, "data-record-invalid", [CHAT]),
    "CSV": ("a.csv", PAIRS, {}, "data-record-invalid", [f"q\n[a{END}]"]),
    "CSV as chats": ("a.csv", PAIRS, CHATS, "csv-with-chat", [f"q\n[a{END}]"]),
    "Parquet": ("a.parquet", PAIRS, {}, "data-record-invalid", [f"q\n[a{END}]"]),
    "arrow": ("a", save([{"text": "t"}]), {"format": "Text"}, None, [f"t[{END}]"]),
    "text": ("a.txt", "one\ntwo\n\n\nthree\n", {"format": "Text"}, None, [f"o[ne\ntwo{END}]", f"t[hree{END}]"]),
    "hub": ("a", hub, {"format": "Text"}, None, [f"t[rain-0000{n}-of-00002{END}]" for n in range(2)]),
    "roles of other names": ("a.jsonl", [{"messages": [{"role": "human", "content": "q"}, {"role": "bot", "content": "a"}]}], CHATS, "data-record-invalid", [CHAT]),
    "Dolly": ("a.jsonl", DOLLY, {}, "data-record-invalid", [f"who\nthe book\n[X{END}]", f"why\n[so{END}]"]),
    "Dolly in Parquet": ("a.parquet", DOLLY, {}, "data-record-invalid", [f"who\nthe book\n[X{END}]", f"why\n[so{END}]"]),
    "a question on a passage": ("a.jsonl", [{"context": "c", "question": "q", "answer": "a", "id": 1}], {"format": "Text"}, "data-record-invalid", [f"q\nc\n[a{END}]"]),
    "Alpaca with a context": ("a.jsonl", [{"instruction": "q", "context": "c", "output": "a"}], {}, "data-record-invalid", [f"q\nc\n[a{END}]"]),
    "a question with a system prompt": ("a.jsonl", [{"system_prompt": "be", "question": "q", "response": "a"}], {}, "data-record-invalid", [f"{ASK}system\nbe{END}\n{CHAT}"]),
    "turns with a system prompt beside": ("a.jsonl", [{"system_prompt": "be", "chat": TURNS}], CHATS, "data-record-invalid", [f"{ASK}system\nbe{END}\n{CHAT}"]),
    "rated answers": ("a.jsonl", RATED, {}, "data-preference-pairs", [f"q[a{END}]", f"q[b{END}]"]),
    "rated answers in CSV": ("a.csv", RATED, {}, "data-preference-pairs", [f"q[a{END}]", f"q[b{END}]"]),
    "rated answers in Parquet": ("a.parquet", RATED, {}, "data-preference-pairs", [f"q[a{END}]", f"q[b{END}]"]),
    "rated turns": ("a.jsonl", [{"prompt": TURNS[:1], "completion": TURNS[1:], "label": False}], CHATS, "data-preference-pairs", [CHAT]),
    "preferences": ("a.jsonl", PREFERENCES, {}, "data-preference-pairs", [f"q\n[good{END}]"]),
}  # fmt: skip


def by_words(fix: str) -> dict:
    """What `set spec.a.b: c and spec.d: e` says."""
    words = fix.rpartition("set ")[2].partition(", which is what")[0].split(" and ")
    return {path: yaml.safe_load(value) for path, _, value in (word.partition(": ") for word in words)}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_prepared_or_refused_with_a_fix_that_works(tmp_path, form):
    name, data, written, rule, expected = FORMS[form]
    root, spec = claim(tmp_path, name, data), spec_of(name, written)
    problems = None
    for _ in range(4):  # what a fix makes of the manifest may need another one, such as a template
        problems = errors(spec) or found_in(root, spec)
        if not problems:
            break
        assert rule in {None, problems[0].rule}
        rule = None
        changes = {change.field: change.value for change in problems[0].changes} or by_words(problems[0].fix)
        if problems[0].rule.startswith("data-"):
            assert changes == by_words(problems[0].fix), "the words and the changes are one fix"
        spec = applied(spec, [FieldChange(field=path, value=value) for path, value in changes.items()])
    assert problems == []
    assert rule is None, "nothing was found"
    assert learnt(root, spec) == expected


def test_presets_and_mappings_are_resolved_in_the_plan_and_old_plans_are_read(tmp_path):
    spec = spec_of("a", {"mapping": {"preset": "Alpaca", "completion": "reply"}})
    plan = resolve(JobIdentity(namespace="", name="j", uid=""), FineTuneJobSpec.model_validate(spec), None)
    chosen = {choice.field: choice.value for choice in plan.choices}
    assert chosen["spec.data.mapping.prompt"] == "instruction"
    assert chosen["spec.data.mapping.separator"] == "\n"
    assert chosen["spec.data.split"] == "train"
    assert "spec.data.mapping.completion" not in chosen
    assert plan.data.mapping.completion == "reply"
    before = json.loads(plan.data.model_dump_json())
    del before["mapping"]
    for entry in before["train"]:
        del entry["splits"], entry["split_is_chosen"]
    read = DataPlan.model_validate(before)
    assert (read.mapping.prompt, read.mapping.separator, read.train[0].splits) == ("prompt", "", ())


def test_a_mapping_is_among_the_inputs_of_the_data(tmp_path):
    root = claim(tmp_path, "a.jsonl", [{"prompt": "p", "completion": "c", "more": "m"}])
    inputs = []
    for mapping in ({}, {"input": "more"}, {"input": "more", "separator": " "}):
        spec = spec_of("a.jsonl", {"mapping": mapping} if mapping else {})
        with prepare(resolved(spec), root, root / "models", TOKENIZER, root / "prepared", num_workers=0) as preparation:
            inputs.append(preparation.inputs["settings"])
    assert "mapping" not in inputs[0], "what earlier releases have prepared is used again"
    assert inputs[1] != inputs[2]


@pytest.mark.parametrize(
    ("mapping", "record", "expected"),
    [
        ({"systemTurn": "be"}, {"messages": TURNS}, f"{ASK}system\nbe{END}\n{CHAT}"),
        ({"systemTurn": "no"}, {"messages": [{"role": "system", "content": "be"}, *TURNS]}, f"{ASK}system\nbe{END}\n{CHAT}"),
        ({"roles": {"bot": "assistant"}}, {"messages": [TURNS[0], {"role": "bot", "content": "a"}]}, CHAT),
        ({"role": "who", "content": "said"}, {"messages": [{"who": turn["role"], "said": turn["content"]} for turn in TURNS]}, CHAT),
        ({"messages": "chat"}, {"chat": TURNS}, CHAT),
    ],
)  # fmt: skip
def test_a_mapping_of_chats(tmp_path, mapping, record, expected):
    root = claim(tmp_path, "a.jsonl", [record])
    assert learnt(root, spec_of("a.jsonl", {**CHATS, "mapping": mapping})) == [expected]


def test_an_unknown_role_is_refused_if_roles_are_mapped(tmp_path):
    turns = [*SHARE_GPT[0]["conversations"], {"from": "narrator", "value": "n"}]
    root = claim(tmp_path, "a.jsonl", [{"conversations": turns}])
    (finding,) = found_in(root, spec_of("a.jsonl", {**CHATS, "mapping": {"preset": "ShareGPT"}}))
    assert "conversations[2].from" in finding.message
    assert finding.fix == 'name the role in spec.data.mapping.roles, as in {"narrator": assistant}'
    assert finding.changes == ()


CALLING = [
    {"from": "human", "value": "q"},
    {"from": "function_call", "value": '{"name": "f"}'},
    {"from": "observation", "value": "1"},
    {"from": "gpt", "value": "a"},
]
CALLED = f'{ASK}user\nq{END}\n{ASK}assistant\n[{{"name": "f"}}{END}]\n{ASK}tool\n1{END}\n{ASK}assistant\n[a{END}]\n'
NAMES = {"human": "user", "gpt": "assistant", "observation": "tool"}


@pytest.mark.parametrize("mapping", [{"preset": "ShareGPT"}, {}])
def test_calls_of_tools_as_turns_are_refused(tmp_path, mapping):
    """Also without mapping.roles, so that no other name of a role is refused."""
    turns = (
        CALLING if mapping else [{"role": NAMES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in CALLING]
    )
    root = claim(tmp_path, "a.jsonl", [{"conversations" if mapping else "messages": turns}])
    spec = spec_of("a.jsonl", {**CHATS, "mapping": mapping})
    (finding,) = found_in(root, spec)
    assert finding.changes == ()
    assert finding.fix == (
        "remove the records with such turns: calls of tools are learnt from tool_calls of a turn, not from turns of their own; to "
        "learn these as plain words of the assistant, set spec.data.mapping.roles.function_call: assistant"
    )
    changed = applied(spec, [FieldChange(field=path, value=value) for path, value in by_words(finding.fix).items()])
    assert learnt(root, changed) == [CALLED]


OF_TOOLS = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}{% for message in messages %}<|im_start|>"
    "{{ message.role }}\n{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "({{ call.function.arguments | tojson if call.function.arguments is mapping else call.function.arguments }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OLDER_TURNS = [
    TURNS[0],
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
    {"role": "function", "name": "f", "content": "1"},
    {**TURNS[1], "function_call": None},
]
NEWER_TURNS = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    {"role": "tool", "name": "f", "content": "1"},
    TURNS[1],
]  # fmt: skip


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet"])
def test_calls_in_the_older_form_are_read_as_those_of_tools(tmp_path, file):
    """function_call, the role function, and functions: what came before tool_calls, the role tool, and tools."""
    function = {"name": "f", "description": "d"}
    root = claim(tmp_path, file, [{"messages": OLDER_TURNS, "functions": [function]}])
    spec = spec_of(file, {**CHATS, "chatTemplate": OF_TOOLS})
    assert found_in(root, spec) == []
    other = tmp_path / "other"
    other.mkdir()
    newer = claim(other, "a.jsonl", [{"messages": NEWER_TURNS, "tools": [{"type": "function", "function": function}]}])
    expected = f'<f>{ASK}user\nq{END}\n{ASK}assistant\n[f({{"x": 1}}){END}]\n{ASK}tool\n1{END}\n{ASK}assistant\n[a{END}]\n'
    assert learnt(newer, spec_of("a.jsonl", {**CHATS, "chatTemplate": OF_TOOLS})) == [expected]
    assert learnt(root, spec) == [expected]


@pytest.mark.parametrize("call", ["auto", {"arguments": "{}"}, [{"name": "f"}]])
def test_a_call_in_the_older_form_that_calls_nothing_is_refused(tmp_path, call):
    turns = [TURNS[0], {"role": "assistant", "content": "a", "function_call": call}]
    root = claim(tmp_path, "a.jsonl", [{"messages": turns}])
    (finding,) = found_in(root, spec_of("a.jsonl", {**CHATS, "chatTemplate": "ChatML"}))
    assert "key 'messages[1].function_call' is not a call of a function" in finding.message
    assert "tool_calls" in finding.fix


def test_a_text_of_tools_that_is_nested_too_deeply_spoils_no_more_than_its_record(tmp_path):
    deep = "[" * 100_000
    root = claim(tmp_path, "a.jsonl", [{"messages": TURNS, "functions": deep}])
    spec = spec_of("a.jsonl", {**CHATS, "chatTemplate": "ChatML"})
    assert found_in(root, spec) == []
    other = tmp_path / "other"
    other.mkdir()
    (finding,) = found_in(claim(other, "a.jsonl", [{"messages": TURNS, "tools": deep}]), spec)
    assert "key 'tools' is a string but not JSON" in finding.message


@pytest.mark.parametrize("nothing", ["", {}, [], {"name": None, "arguments": None}], ids=str)
def test_the_forms_in_which_programs_write_no_call_are_no_call(tmp_path, nothing):
    """Tables whose turns have one form for all hold an object of nulls, or an empty text."""
    turns = [TURNS[0], {**TURNS[1], "function_call": nothing}]
    root = claim(tmp_path, "a.jsonl", [{"messages": turns}])
    assert learnt(root, spec_of("a.jsonl", {**CHATS, "chatTemplate": "ChatML"})) == [CHAT]


def test_a_role_of_the_name_function_stays_if_no_turn_calls_in_the_older_form(tmp_path):
    turns = [TURNS[0], {"role": "function", "content": "1"}, TURNS[1]]
    root = claim(tmp_path, "a.jsonl", [{"messages": turns}])
    spec = spec_of("a.jsonl", {**CHATS, "chatTemplate": "ChatML"})
    assert learnt(root, spec) == [f"{ASK}user\nq{END}\n{ASK}function\n1{END}\n{ASK}assistant\n[a{END}]\n"]


def test_rated_answers_are_refused_as_preferences_are(tmp_path):
    root = claim(tmp_path, "a.jsonl", RATED)
    (finding,) = found_in(root, spec_of("a.jsonl", {}))
    assert (finding.rule, finding.value, finding.changes) == ("data-preference-pairs", "true", ())
    assert "key 'label' says whether the answer is desired" in finding.message
    assert finding.message.endswith("it would also learn undesired answers (and the same on 1 more line)")
    assert finding.fix == (
        "train on them with a tool for preferences, such as TRL's KTOTrainer; to imitate the desired answers, keep these records "
        "alone and remove the key; to learn the records whatever it says, set spec.data.mapping.ignored: [label]"
    )


@pytest.mark.parametrize("label", [1, "positive", None, "Truely"])
def test_a_label_of_another_kind_is_a_key_like_others(tmp_path, label):
    root = claim(tmp_path, "a.jsonl", [{"prompt": "q", "completion": "a", "label": label}])
    assert learnt(root, spec_of("a.jsonl", {})) == [f"q[a{END}]"]


def test_roles_are_named_although_other_records_have_those_that_templates_know(tmp_path):
    other = [{"role": "human", "content": "q"}, {"role": "bot", "content": "a"}]
    root = claim(tmp_path, "a.jsonl", [{"messages": TURNS}, {"messages": other}])
    (finding,) = found_in(root, spec_of("a.jsonl", CHATS))
    assert finding.fix == "set spec.data.mapping.roles.human: user and spec.data.mapping.roles.bot: assistant"
    mapping = {"roles": {change.field.removeprefix("spec.data.mapping.roles."): change.value for change in finding.changes}}
    assert mapping == {"roles": {"human": "user", "bot": "assistant"}}
    assert len(learnt(root, spec_of("a.jsonl", {**CHATS, "mapping": mapping}))) == 2


def test_roles_that_may_mean_anything_are_not_mapped_by_a_program(tmp_path):
    turns = [{"role": "north", "content": "q"}, {"role": "south", "content": "a"}]
    root = claim(tmp_path, "a.jsonl", [{"messages": turns}])
    (finding,) = found_in(root, spec_of("a.jsonl", CHATS))
    assert "its roles are 'north', 'south'" in finding.message
    assert finding.fix == 'name the role of the answers in spec.data.mapping.roles, as in {"south": "assistant"}'
    assert finding.changes == ()


def test_turns_without_an_answer_are_not_mapped(tmp_path):
    root = claim(tmp_path, "a.jsonl", [{"prompt": TURNS[:1], "id": 1}])
    (finding,) = found_in(root, spec_of("a.jsonl", CHATS))
    assert (finding.fix, finding.changes) == (f"write {example(DataFormat.CHAT)}", ())
    assert "key 'messages' is missing" in finding.message


@pytest.mark.parametrize("name", ["promt\udc80", "promt\n", "prompt" * 22])
def test_a_name_that_no_manifest_can_hold_is_not_proposed(tmp_path, name):
    root = claim(tmp_path, "a.jsonl", [{name: "q", "completion": "a"}])
    (finding,) = found_in(root, spec_of("a.jsonl", {}))
    assert (finding.fix, finding.changes) == ('write {"prompt": "...", "completion": "..."}', ())
    finding.model_dump_json()


def test_lines_of_a_text_may_be_its_records(tmp_path):
    root = claim(tmp_path, "a.txt", "one\n\n two\n")
    spec = spec_of("a.txt", {"format": "Text", "mapping": {"textUnit": "Line"}})
    assert learnt(root, spec) == [f"o[ne{END}]", f" [two{END}]"]


def test_a_directory_with_splits_is_read_one_split_at_a_time(tmp_path):
    root = claim(tmp_path, "a", hub)
    write(root / "data/a/data/extra.parquet", [{"text": "extra"}])
    spec = spec_of("a", {"format": "Text", "validation": {"source": "pvc://data/a"}})
    plan = resolved(spec)
    with prepare(plan, root, root / "models", TOKENIZER, root / "prepared", num_workers=0) as preparation:
        (train, held_out) = preparation.findings
        assert {name: facts.num_records for name, facts in preparation.splits.items()} == {"train": 2, "validation": 1}
    assert (train.rule, train.severity) == ("data-files-left-out", "warning")
    assert "1 of its files name no split and are not read (data/extra.parquet)" in train.message
    assert held_out.field == "spec.data.validation.source"


@pytest.mark.parametrize(
    ("data", "field", "change"),
    [
        ({"split": "train_sft"}, "spec.data.split", None),
        ({"validation": {"source": "pvc://data/a", "split": "dev"}}, "spec.data.validation.split", None),
        ({"source": "pvc://data/b", "split": "train"}, "spec.data.split", {"spec.data.split": None}),
    ],
)
def test_a_split_that_there_is_not_is_refused_with_those_that_there_are(tmp_path, data, field, change):
    root = claim(tmp_path, "a", hub)
    (root / "data/b").mkdir()
    write(root / "data/b/x.jsonl", [{"text": "x"}])
    (finding,) = found_in(root, spec_of("a", {"format": "Text", **data}))
    assert (finding.rule, finding.field) == ("data-split-missing", field)
    if change is None:
        assert "test, train" in finding.message
        assert finding.fix == f"set {field} to test or train"
    else:
        assert {each.field: each.value for each in finding.changes} == change


@pytest.mark.parametrize("held_out", ["a.jsonl", "copy.jsonl"])
def test_a_held_out_source_of_the_same_files_is_refused(tmp_path, held_out):
    root = claim(tmp_path, "a.jsonl", [{"text": "t"}])
    write(root / "data/copy.jsonl", [{"text": "t"}])
    spec = spec_of("a.jsonl", {"format": "Text", "validation": {"source": f"pvc://data/{held_out}"}})
    finding = found_in(root, spec)[-1]
    assert (finding.rule, finding.field) == ("data-held-out-in-training", "spec.data.validation.source")
    assert "1 of its files are trained on too (pvc://data/a.jsonl)" in finding.message


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"),
        ("data/train-00000-of-00009.parquet", "train"),
        ("train_sft-00000-of-00003.parquet", "train_sft"),
        ("en/valid/part-0.jsonl", "validation"),
        ("my_dev.json", "validation"),
        ("test/data-00000-of-00001.arrow", "test"),
        ("data-00000-of-00001.arrow", ""),
        ("train-test.jsonl", ""),
        ("contrained.jsonl", ""),
        ("constraint.csv", ""),
    ],
)
def test_the_split_of_a_file_follows_from_its_name(path, split):
    assert split_of(Path(path)) == split


def test_metadata_of_the_datasets_library_is_not_read_as_records(tmp_path):
    save([{"text": "t"}])(tmp_path / "a")
    assert [str(path.relative_to(tmp_path)) for path in record_files(tmp_path)] == [
        "a/test/data-00000-of-00001.arrow",
        "a/train/data-00000-of-00001.arrow",
    ]
