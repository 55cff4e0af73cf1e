"""Which wrong records `onInvalidRecord: Skip` leaves out, and that the look at the data and preflight agree about them."""

import json

import pytest

from finetune_job.api.inputs import DataFormat, LossOn, OnInvalidRecord
from finetune_trainer.data import file_parts
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.shards import read_manifest
from finetune_trainer.roles.look import look
from tests.unit.finetune_trainer.data.chat_templates import CHATML
from tests.unit.finetune_trainer.roles.test_look import CHAT, claims, order, plan, said, write

__all__ = ["claims"]
SKIP = {"on_invalid_record": OnInvalidRecord.SKIP}
PAIRS = {"format": DataFormat.PROMPT_COMPLETION, "loss_on": LossOn.COMPLETION}
NO_ROLE = {"messages": [{"content": "q"}, {"role": "assistant", "content": "a"}]}
NOTHING_LEARNT = {"messages": [{"role": "user", "content": "q"}]}


def chats(number):
    return [{"messages": [{"role": "user", "content": f"q{place}"}, CHAT["messages"][1]]} for place in range(number)]


def judged(claims, name="train.jsonl", **changes):
    """The findings, which the look has to share, and the counts of the training records."""
    data = plan(**changes)
    train = data.train[0].model_copy(update={"location": data.train[0].location.model_copy(update={"path": name})})
    data = data.model_copy(update={"train": (train,)})
    with prepare(data, claims, claims / "models", CHATML.tokenizer(), claims / "prepared", num_workers=0) as preparation:
        findings = [finding.model_dump(mode="json") for finding in preparation.findings]
        if not any(finding["severity"] == "error" for finding in findings):
            preparation.publish()
    assert said(look(order(claims, data, limit=10_000))["findings"]) == said(findings)
    return findings, preparation.splits.get("train")


def test_a_few_wrong_records_are_skipped_and_listed(claims, monkeypatch):
    monkeypatch.setattr(file_parts, "PART_BYTES", 500)
    records = chats(97)
    for place, wrong in ((3, '{"messages": ['), (50, NO_ROLE), (96, "\xff")):
        records.insert(place, wrong)
    text = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    (claims / "data/train.jsonl").write_bytes(text.encode("latin-1"))
    (finding,), train = judged(claims, **SKIP)
    assert (finding["rule"], finding["severity"]) == ("data-records-skipped", "warning")
    places = finding["message"].split("; ")
    assert places[0].startswith("3 of 100 records cannot be used, and are skipped: pvc://data/train.jsonl line 4: is not JSON")
    assert places[1].startswith("pvc://data/train.jsonl line 51: key 'messages[0].role' ")
    assert places[2].startswith("pvc://data/train.jsonl line 97: is not UTF-8")
    assert (train.num_records, train.num_occurrences) == (97, 97)
    # The others are what they would be alone.
    skipped = read_manifest(claims / "prepared")["files"]
    write(claims, "train.jsonl", chats(97))
    assert judged(claims, **SKIP)[0] == []
    assert read_manifest(claims / "prepared")["files"] == skipped


def test_the_list_ends_and_the_rest_is_counted(claims):
    write(claims, "train.jsonl", [*chats(570), *[NO_ROLE] * 15, *["{"] * 15])
    (finding,), _ = judged(claims, **SKIP)
    assert finding["message"].count("jsonl line ") == 20
    assert finding["message"].endswith("and 10 more")


@pytest.mark.parametrize(("right", "is_refused"), [(38, False), (37, True)])
def test_one_in_twenty_is_the_most(claims, right, is_refused):
    """2 of 40 are 5 %."""
    write(claims, "train.jsonl", [*chats(right), NOTHING_LEARNT, NO_ROLE])
    (first, *kinds), _ = judged(claims, **SKIP)
    assert (first["rule"], first["severity"]) == ("data-records-skipped", "error" if is_refused else "warning")
    assert [finding["rule"] for finding in kinds] == ["data-record-invalid"] * 2 * is_refused
    assert ("more than the 5 % that can be skipped" in first["message"]) == is_refused


def test_the_share_of_a_part_of_the_records_is_not_judged(claims):
    write(claims, "train.jsonl", [NO_ROLE, *chats(40)])
    (finding,) = look(order(claims, plan(**SKIP), limit=5))["findings"]
    assert (finding["rule"], finding["severity"]) == ("data-records-skipped", "warning")


def test_by_default_one_wrong_record_refuses_the_job(claims):
    write(claims, "train.jsonl", [*chats(99), NO_ROLE])
    assert [finding["rule"] for finding in judged(claims)[0]] == ["data-record-invalid"]


PAIR, PREFERENCE = '{"prompt": "p", "completion": "c"}', '{"prompt": "p", "chosen": "a", "rejected": "b"}'


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        # Labels, preferences and media ask for another training.
        ("train.jsonl", {}, "\n".join(map(json.dumps, [*chats(99), {**CHAT, "label": False}]))),
        ("train.jsonl", {}, "\n".join(map(json.dumps, [*chats(99), {**CHAT, "images": ["a.png"]}]))),
        ("train.jsonl", PAIRS, "\n".join([*[PAIR] * 99, PREFERENCE])),
        # A file that was cut off, and mistakes of brackets and quotes that may have swallowed other records.
        ("train.json", {}, json.dumps(chats(100))[:-5]),
        ("train.json", {}, json.dumps(chats(99))[:-1] + ', {"messages": }]'),
        ("train.csv", PAIRS, "prompt,completion\n" + "p,c\n" * 99 + '"p\np,c",c,d\n'),
        ("train.csv", PAIRS, "prompt,completion\n" + "p,c\n" * 99 + 'p,"c\np,c\n'),
    ],
)
def test_what_is_not_the_mistake_of_one_record_is_never_skipped(claims, name, changes, text):
    (claims / "data" / name).write_text(text)
    found = [(finding["severity"], finding["rule"]) for finding in judged(claims, name, **SKIP, **changes)[0]]
    assert found in ([("error", "data-record-invalid")], [("error", "data-preference-pairs")])


def test_a_row_with_too_many_values_is_skipped(claims):
    (claims / "data/train.csv").write_text("prompt,completion\n" + "".join(f"p{n},c\n" for n in range(99)) + "p,c,d\n")
    (finding,), train = judged(claims, "train.csv", **SKIP, **PAIRS)
    assert (finding["rule"], train.num_records) == ("data-records-skipped", 99)
