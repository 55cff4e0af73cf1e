"""From files to prepared data: nothing lost, drops counted, mistakes found, equal inputs reused."""

import json

import pytest

from finetune_job.api.base import claim_path
from finetune_job.api.data import DataFormat, LossOn
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.batches import IGNORED_LABEL, PreparedData
from finetune_trainer.data.prepare import prepare, write
from tests.unit.trainer_data.tokenizers_by_hand import word_tokenizer

RECORDS = [{"prompt": "a b ", "completion": " ".join("c" * count)} for count in (1, 5, 2, 2, 3, 1)]


@pytest.fixture
def claims(tmp_path):
    (tmp_path / "data").mkdir()
    word_tokenizer().save_pretrained(tmp_path / "models")
    write_records(tmp_path, RECORDS)
    return tmp_path


def write_records(claims, records, name="train"):
    (claims / "data" / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def plan(**changes):
    settings = {
        "train": claim_path("pvc://data/train.jsonl"),
        "validation": None,
        "format": DataFormat.PROMPT_COMPLETION,
        "max_sequence_length": 10,
        "packing": True,
        "loss_on": LossOn.COMPLETION,
    }
    return DataPlan(**settings | changes)


def prepared(claims, data_plan, tokenizer=None):
    return prepare(data_plan, claims, claims / "models", tokenizer or word_tokenizer(), claims / "prepared")


def documents(split):
    return sorted(split.document(index) for index in range(split.num_documents))


EXPECTED = sorted([2, 3] + [4] * count + [0] for count in (1, 5, 2, 2, 3, 1))


@pytest.mark.parametrize("packing", [True, False])
def test_every_record_is_in_the_data_once(claims, packing):
    preparation = prepared(claims, plan(packing=packing))
    write(preparation, claims / "prepared")
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
    write(prepared(claims, plan(packing=packing)), claims / "prepared")
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
    (finding,) = preparation.findings
    assert (finding.rule, finding.severity, finding.value) == ("data-records-dropped", "warning", "6")
    assert "1 of 6 records are longer than 6 tokens and are dropped; the shortest of them has 8" in finding.message
    assert preparation.splits["train"].num_dropped == 1
    write(preparation, claims / "prepared")
    assert documents(PreparedData.open(claims / "prepared").train) == [ids for ids in EXPECTED if len(ids) <= 6]


def test_records_that_are_all_too_long_are_an_error(claims):
    preparation = prepared(claims, plan(max_sequence_length=3))
    (finding,) = preparation.findings
    assert (finding.rule, finding.severity, finding.field) == ("data-all-too-long", "error", "spec.data.maxSequenceLength")
    assert "to 4 or more" in finding.fix
    assert not preparation.splits


def test_a_missing_file_names_what_lies_beside(claims):
    (finding,) = prepared(claims, plan(train=claim_path("pvc://data/trian.jsonl"))).findings
    assert (finding.rule, finding.field, finding.value) == ("data-file-missing", "spec.data.source", "pvc://data/trian.jsonl")
    assert "train.jsonl" in finding.message


def test_a_directory_is_not_a_file(claims):
    (finding,) = prepared(claims, plan(train=claim_path("pvc://data"))).findings
    assert finding.rule == "data-file-unreadable"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(claims, content):
    (claims / "data" / "train.jsonl").write_text(content)
    (finding,) = prepared(claims, plan()).findings
    assert finding.rule == "data-empty"


def test_mistakes_of_one_kind_are_one_finding_and_all_files_are_read(claims):
    write_records(claims, [RECORDS[0], {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "completion": ""}])
    write_records(claims, [{"prompt": 1, "completion": "c"}], "held")
    findings = prepared(claims, plan(validation=claim_path("pvc://data/held.jsonl"))).findings
    assert [(finding.rule, finding.field) for finding in findings] == [
        ("data-record-invalid", "spec.data.source"),
        ("data-record-invalid", "spec.data.source"),
        ("data-record-invalid", "spec.data.validation.source"),
    ]
    assert "pvc://data/train.jsonl line 2: key 'completion' is missing (and the same on 1 more lines)" in findings[0].message
    assert "line 4: key 'completion' is empty" in findings[1].message
    assert "pvc://data/held.jsonl line 1: key 'prompt' is a number" in findings[2].message


def test_without_a_tokenizer_the_records_are_checked_all_the_same(claims):
    write_records(claims, [{"prompt": "a"}])
    preparation = prepare(plan(), claims, claims / "models", None, claims / "prepared")
    assert [finding.rule for finding in preparation.findings] == ["data-record-invalid"]


def test_checking_writes_nothing(claims):
    before = sorted(claims.rglob("*"))
    prepared(claims, plan())
    assert sorted(claims.rglob("*")) == before


def test_equal_inputs_are_reused_with_their_warnings(claims):
    first = prepared(claims, plan(max_sequence_length=6))
    data_hash = write(first, claims / "prepared")
    written = (claims / "prepared" / "manifest.json").stat().st_mtime_ns
    again = prepared(claims, plan(max_sequence_length=6))
    assert again.written_data_hash == data_hash == write(again, claims / "prepared")
    assert (again.findings, again.splits) == (first.findings, first.splits)
    assert (claims / "prepared" / "manifest.json").stat().st_mtime_ns == written


def change_source(claims):
    write_records(claims, RECORDS[1:])


def change_tokenizer(claims):
    path = claims / "models" / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")


def damage(claims):
    path = claims / "prepared" / "train" / "tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [change_source, change_tokenizer, damage])
def test_changed_inputs_or_damaged_data_are_prepared_anew(claims, change):
    write(prepared(claims, plan()), claims / "prepared")
    change(claims)
    again = prepared(claims, plan())
    assert not again.written_data_hash
    assert write(again, claims / "prepared") == PreparedData.open(claims / "prepared").data_hash


@pytest.mark.parametrize("changed", [{"packing": False}, {"loss_on": LossOn.ALL}, {"max_sequence_length": 9}])
def test_changed_settings_are_prepared_anew(claims, changed):
    first = write(prepared(claims, plan()), claims / "prepared")
    again = prepared(claims, plan(**changed))
    assert not again.written_data_hash
    assert write(again, claims / "prepared") != first
