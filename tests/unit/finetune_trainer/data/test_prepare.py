"""From files to prepared data: nothing lost, drops counted, mistakes found, equal inputs reused."""

import errno
import json
import shutil
from collections import Counter
from itertools import pairwise

import pytest

from finetune_job.api.base import claim_path
from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.plan.run_plan import DataPlan, DatasetPlan
from finetune_trainer.data import file_parts as parts
from finetune_trainer.data import shard_writer
from finetune_trainer.data.batches import IGNORED_LABEL, PreparedData
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.progress import PreparingProgress
from finetune_trainer.errors import DataError
from tests.unit.finetune_trainer.data.chat_templates import HARMONY, QWEN3
from tests.unit.finetune_trainer.data.tokenizers_by_hand import word_tokenizer

RECORDS = [{"prompt": "a b ", "completion": " ".join("c" * count)} for count in (1, 5, 2, 2, 3, 1)]


@pytest.fixture
def claims(tmp_path):
    (tmp_path / "data").mkdir()
    word_tokenizer().save_pretrained(tmp_path / "models")
    write_records(tmp_path, RECORDS)
    return tmp_path


def write_records(claims, records, name="train"):
    (claims / "data" / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def data_set(source, field="spec.data.source", weight=1.0):
    return DatasetPlan(location=claim_path(source), source=source, field=field, weight=weight)


def held_out(source):
    return data_set(source, "spec.data.validation.source")


def plan(**changes):
    settings = {
        "train": (data_set("pvc://data/train.jsonl"),),
        "validation": None,
        "format": DataFormat.PROMPT_COMPLETION,
        "chat_template": None,
        "max_sequence_length": 10,
        "packing": True,
        "loss_on": LossOn.COMPLETION,
    }
    return DataPlan(**settings | changes)


def prepared(claims, data_plan, **settings):
    return prepare(data_plan, claims, claims / "models", word_tokenizer(), claims / "prepared", **{"num_workers": 0, **settings})


def documents(split):
    return sorted(split.document(index) for index in range(split.num_documents))


EXPECTED = sorted([2, 3] + [4] * count + [0] for count in (1, 5, 2, 2, 3, 1))


@pytest.mark.parametrize("packing", [True, False])
def test_every_record_is_in_the_data_once(claims, packing):
    preparation = prepared(claims, plan(packing=packing))
    preparation.publish()
    train = PreparedData.open(claims / "prepared").train
    assert documents(train) == EXPECTED
    assert train.num_sequences == (4 if packing else 6)
    assert (
        train.num_supervised_tokens
        == sum(count + 1 for count in (1, 5, 2, 2, 3, 1))
        == preparation.splits["train"].num_supervised_tokens
    )


@pytest.mark.parametrize("packing", [True, False])
def test_masks_and_counts_survive_the_rearrangement(claims, packing):
    prepared(claims, plan(packing=packing)).publish()
    train = PreparedData.open(claims / "prepared").train
    for index in range(train.num_sequences):
        batch = train.batch([index])
        supervised = batch.labels[batch.labels != IGNORED_LABEL]
        # By construction the completion's word and the end token are supervised, the prompt's words are not.
        assert set(supervised.tolist()) == {4, 0}
        assert len(supervised) == train.supervised_tokens([index]) == batch.num_supervised_tokens
        assert int((batch.input_ids[0] == 4).sum()) == int((supervised == 4).sum())


def test_records_beyond_the_limit_are_dropped_and_counted(claims):
    preparation = prepared(claims, plan(max_sequence_length=6))
    finding, repeated = preparation.findings
    # Three of the records are one text.
    assert (repeated.rule, repeated.severity) == ("data-records-repeated", "warning")
    assert "2 of its 5 records equal" in repeated.message
    assert sum(preparation.datasets[0].lengths.values()) == 6
    assert (finding.rule, finding.severity, finding.value) == ("data-records-dropped", "warning", "6")
    assert "1 of 6 records are longer than 6 tokens and are dropped; the shortest of them has 8" in finding.message
    assert preparation.splits["train"].num_dropped == 1
    preparation.publish()
    assert documents(PreparedData.open(claims / "prepared").train) == [ids for ids in EXPECTED if len(ids) <= 6]


def test_records_that_are_all_too_long_are_an_error(claims):
    preparation = prepared(claims, plan(max_sequence_length=3))
    (finding,) = preparation.findings
    assert (finding.rule, finding.severity, finding.field) == ("data-all-too-long", "error", "spec.data.maxSequenceLength")
    assert "to 4 or more" in finding.fix
    assert not preparation.splits


@pytest.mark.parametrize(
    ("completion", "unknown", "severity"),
    [("d e", "a", None), ("x e", "a", "warning"), ("x y z", "a", "error"), ("x y z", "</s>", None)],
)
def test_text_that_the_tokenizer_does_not_know_is_told_of(claims, completion, unknown, severity):
    """Of the tokens of prompt, completion and end: 1 of 5, 3 of 6. A word that ends texts, too, stands for no unknown one."""
    write_records(claims, [{"prompt": "b c ", "completion": completion}])
    tokenizer = word_tokenizer()
    tokenizer.unk_token = unknown
    found = prepare(plan(), claims, claims / "models", tokenizer, claims / "prepared", num_workers=0).findings
    assert [(finding.rule, finding.severity) for finding in found] == [("data-unknown-tokens", severity)][: severity is not None]
    assert all("1 of its 5 tokens" in finding.message or "3 of its 6" in finding.message for finding in found)


def test_a_missing_file_names_what_lies_beside(claims):
    (finding,) = prepared(claims, plan(train=(data_set("pvc://data/trian.jsonl"),))).findings
    assert (finding.rule, finding.field, finding.value) == ("data-file-missing", "spec.data.source", "pvc://data/trian.jsonl")
    assert "train.jsonl" in finding.message


def test_a_directory_is_read_file_by_file(claims):
    write_records(claims, RECORDS[:1], "more")
    with prepared(claims, plan(train=(data_set("pvc://data"),))) as preparation:
        preparation.publish()
    assert documents(PreparedData.open(claims / "prepared").train) == sorted([*EXPECTED, [2, 3, 4, 0]])


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(claims, content):
    (claims / "data" / "train.jsonl").write_text(content)
    (finding,) = prepared(claims, plan()).findings
    assert finding.rule == "data-empty"


def test_mistakes_of_one_kind_are_one_finding_and_all_files_are_read(claims):
    write_records(claims, [RECORDS[0], {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "completion": ""}])
    write_records(claims, [{"prompt": 1, "completion": "c"}], "held")
    findings = prepared(claims, plan(validation=held_out("pvc://data/held.jsonl"))).findings
    assert [(finding.rule, finding.field) for finding in findings] == [
        ("data-record-invalid", "spec.data.source"),
        ("data-record-invalid", "spec.data.source"),
        ("data-record-invalid", "spec.data.validation.source"),
    ]
    assert "pvc://data/train.jsonl line 2: key 'completion' is missing (and the same on 1 more line)" in findings[0].message
    assert "line 4: key 'completion' is empty" in findings[1].message
    assert "pvc://data/held.jsonl line 1: key 'prompt' is a number" in findings[2].message


def test_a_key_that_most_records_have_is_not_mapped_to_the_name_in_one_record(claims):
    write_records(claims, [RECORDS[0], {"prompt": "a", "completio": "b"}])
    (finding,) = prepared(claims, plan()).findings
    assert (finding.fix, finding.changes) == ("write 'completion' as the other records of this source have it", ())
    write_records(claims, [{"prompt": "a", "completio": "b"}])
    (finding,) = prepared(claims, plan()).findings
    assert [(change.field, change.value) for change in finding.changes] == [("spec.data.mapping.completion", "completio")]


def test_without_a_tokenizer_the_records_are_checked_all_the_same(claims):
    write_records(claims, [{"prompt": "a"}])
    preparation = prepare(plan(), claims, claims / "models", None, claims / "prepared")
    assert [finding.rule for finding in preparation.findings] == ["data-record-invalid"]


def test_data_that_is_not_published_leaves_nothing(claims):
    before = sorted(claims.rglob("*"))
    with prepared(claims, plan()):
        assert sorted(claims.rglob("*")) != before
    assert sorted(claims.rglob("*")) == before


def test_equal_inputs_are_reused_with_their_warnings(claims):
    first = prepared(claims, plan(max_sequence_length=6))
    data_hash = first.publish()
    written = (claims / "prepared" / "manifest.json").stat().st_mtime_ns
    again = prepared(claims, plan(max_sequence_length=6))
    assert again.written_data_hash == data_hash == again.publish()
    assert (again.findings, again.splits) == (first.findings, first.splits)
    assert (claims / "prepared" / "manifest.json").stat().st_mtime_ns == written


def change_source(claims):
    write_records(claims, RECORDS[1:])


def change_tokenizer(claims):
    path = claims / "models" / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")


def damage(claims):
    path = claims / "prepared" / "train" / "tokens-00000.i4"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [change_source, change_tokenizer, damage])
def test_changed_inputs_or_damaged_data_are_prepared_again(claims, change):
    prepared(claims, plan()).publish()
    change(claims)
    again = prepared(claims, plan())
    assert not again.written_data_hash
    assert again.publish() == PreparedData.open(claims / "prepared").data_hash


@pytest.mark.parametrize("changed", [{"packing": False}, {"loss_on": LossOn.ALL}, {"max_sequence_length": 9}])
def test_data_is_prepared_again_for_changed_settings(claims, changed):
    first = prepared(claims, plan()).publish()
    again = prepared(claims, plan(**changed))
    assert not again.written_data_hash
    assert again.publish() != first


# Several data sets with weights, and held-out records


def weighted(claims, *weights):
    for number in range(len(weights)):
        write_records(
            claims, [{"prompt": "", "completion": " ".join("abcde"[number] * (count + 2))} for count in range(4)], f"set-{number}"
        )
    return tuple(
        data_set(f"pvc://data/set-{number}.jsonl", f"spec.data.datasets[{number}].source", weight)
        for number, weight in enumerate(weights)
    )


@pytest.mark.parametrize("packing", [True, False])
def test_records_occur_as_often_as_their_weight_says_and_are_stored_once(claims, packing):
    data_plan = plan(train=weighted(claims, 2.0, 0.5), packing=packing, loss_on=LossOn.ALL)
    with prepared(claims, data_plan) as preparation:
        preparation.publish()
    train = PreparedData.open(claims / "prepared").train
    seen = Counter()
    for index in range(train.num_sequences):
        batch = train.batch([index])
        starts = (batch.position_ids[0] == 0).nonzero().flatten().tolist()
        for start, stop in pairwise([*starts, batch.input_ids.shape[1]]):
            ids = batch.input_ids[0, start:stop].tolist()
            if any(ids):  # the rest of a row is padding, which is the end token
                seen[tuple(ids[: ids.index(0)])] += 1
    assert seen == {(2,) * 2: 2, (2,) * 3: 2, (2,) * 4: 2, (2,) * 5: 2, (3,) * 3: 1, (3,) * 5: 1}
    assert train.num_documents == 8
    facts = preparation.splits["train"]
    assert (facts.num_records, facts.num_occurrences) == (8, 10)
    assert facts.num_tokens == 2 * (3 + 4 + 5 + 6) + 4 + 6
    assert facts.num_supervised_tokens == facts.num_tokens - 10 == train.num_supervised_tokens


def test_counts_of_each_data_set_are_kept(claims):
    with prepared(claims, plan(train=weighted(claims, 2.0, 0.5), max_sequence_length=5, loss_on=LossOn.ALL)) as first:
        first.publish()
    assert [
        (facts.source, facts.num_records, facts.num_dropped, facts.num_tokens, facts.num_occurrences) for facts in first.datasets
    ] == [("pvc://data/set-0.jsonl", 4, 1, 12, 6), ("pvc://data/set-1.jsonl", 4, 1, 12, 1)]
    with prepared(claims, plan(train=weighted(claims, 2.0, 0.5), max_sequence_length=5, loss_on=LossOn.ALL)) as again:
        assert again.datasets == first.datasets


def test_a_weight_that_leaves_no_record_is_an_error(claims):
    with prepared(claims, plan(train=weighted(claims, 1.0, 0.2))) as preparation:
        (finding,) = preparation.findings
    assert (finding.rule, finding.severity, finding.field) == (
        "data-weight-without-records",
        "error",
        "spec.data.datasets[1].weight",
    )
    assert "0.25" in finding.fix
    assert "train" not in preparation.splits


def test_training_records_that_are_held_out_are_refused_with_their_number(claims):
    write_records(claims, [RECORDS[1], RECORDS[2], {"prompt": "e ", "completion": "e"}], "held")
    with prepared(claims, plan(validation=held_out("pvc://data/held.jsonl"))) as preparation:
        _, finding = preparation.findings
        assert "train" not in preparation.splits
    assert (finding.rule, finding.severity) == ("data-held-out-in-training", "error")
    # Records 2 and 3 of the training data are one text, so three of them are held out.
    assert finding.message.startswith("3 of its 6 records are held out")


# The same bytes, no matter who prepares them


def many(claims, count=300):
    write_records(claims, [{"prompt": "a " * (n % 5), "completion": "b c " * (n % 7 + 1)} for n in range(count)])
    write_records(claims, [{"prompt": "", "completion": "d " * (n % 4 + 1)} for n in range(40)], "held")
    return plan(max_sequence_length=24, validation=held_out("pvc://data/held.jsonl"))


def chats(claims, family, *answers, **changes):
    """Preparation of a chat for each of the answers, which are turns or texts."""
    turns = [{"role": "assistant", "content": answer} if isinstance(answer, str) else answer for answer in answers]
    write_records(claims, [{"messages": [{"role": "user", "content": "q"}, turn]} for turn in turns])
    settings = {"format": DataFormat.CHAT, "loss_on": LossOn.ASSISTANT, "max_sequence_length": 100} | changes
    return prepare(plan(**settings), claims, claims / "models", family.tokenizer(), claims / "prepared", num_workers=0)


def test_what_the_template_leaves_out_is_a_warning_of_the_records_that_are_kept(claims):
    template = QWEN3.template.replace("loop.last", "false")
    thoughtful = [f"<think>\n{'b' * length}\n</think>\n\n{'a' * length}" for length in (1, 2)]
    with chats(claims, QWEN3, "plain", *thoughtful, f"{thoughtful[0]}{'c' * 100}", chat_template=template) as preparation:
        dropped, told = preparation.findings
    assert (dropped.rule, told.rule, told.severity) == ("data-records-dropped", "chat-words-left-out", "warning")
    assert told.message.startswith(
        "pvc://data/train.jsonl line 2: key 'messages[1].content' holds thoughts that the chat template"
    )
    assert told.message.endswith("so they are not learnt (and the same on 1 more line)")
    assert (told.field, told.value) == ("spec.data.source", "b")
    assert preparation.splits["train"].num_records == 4


def test_the_models_own_stop_tokens_decide_where_a_turn_that_calls_a_tool_ends(claims):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with chats(claims, HARMONY, call) as refused:
        assert "learn to stop" in refused.findings[0].message
    stop = HARMONY.tokenizer().convert_tokens_to_ids("<|call|>")
    (claims / "models" / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    with chats(claims, HARMONY, call) as preparation:
        assert preparation.findings == ()
        preparation.publish()
    assert PreparedData.open(claims / "prepared").train.document(0)[-1] == stop
    # What decided the data is among its inputs.
    (claims / "models" / "generation_config.json").unlink()
    with chats(claims, HARMONY, call) as refused:
        assert refused.findings != ()


def test_the_data_hash_depends_neither_on_processes_nor_on_parts_of_them(claims, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 900)
    data_plan, hashes = many(claims), []
    # In this process, by one other and by several.
    for num_workers in (0, 1, 3):
        shutil.rmtree(claims / "prepared", ignore_errors=True)
        with prepared(claims, data_plan, num_workers=num_workers) as preparation:
            hashes.append(preparation.publish())
    assert len(set(hashes)) == 1
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 20)
    shutil.rmtree(claims / "prepared")
    with prepared(claims, data_plan, num_workers=0) as preparation:
        assert preparation.publish() == hashes[0]


def test_lines_are_counted_from_the_beginning_of_the_file_whatever_its_parts(claims, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 64)
    write_records(claims, [*RECORDS, {"prompt": "a"}, *RECORDS, {"prompt": "a"}])
    (finding,) = prepared(claims, plan()).findings
    assert "line 7: key 'completion' is missing (and the same on 1 more line)" in finding.message


def test_a_full_disk_is_the_file_systems_error_and_leaves_nothing(claims, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(claims.rglob("*"))
    monkeypatch.setattr(shard_writer._DigestedFile, "write", fail)
    with pytest.raises(OSError, match="No space"):
        prepared(claims, plan())
    assert sorted(claims.rglob("*")) == before


def test_a_file_that_changes_while_it_is_read_is_an_error(claims, monkeypatch):
    def append(*_):
        write_records(claims, [*RECORDS, *RECORDS])

    monkeypatch.setattr(PreparingProgress, "advance", append)
    with pytest.raises(DataError, match=r"train\.jsonl was changed while it was read"):
        prepared(claims, plan())
