"""Settings of `data` that say nothing about the records they are written with: what follows if nothing refuses
them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.data.prepare import SplitFacts, prepare
from finetune_trainer.data.records import occurrences
from finetune_trainer.data.shards import TRAIN
from finetune_trainer.data.sources import list_sources
from tests.pitfalls.manifests import plans, specs
from tests.unit.finetune_trainer.data.tokenizers_by_hand import word_tokenizer

TEXTS = [{"text": "a b c d e"}, {"text": "b c"}]
PAIRS = [{"prompt": "a b ", "completion": "c d"}, {"prompt": "b ", "completion": "e"}]
CHATS = [{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}]
TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'assistant' %}{% generation %}{{ turn.content }} </s>{% endgeneration %}"
    "{% else %}e {{ turn.content }} e {% endif %}{% endfor %}"
)


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    word_tokenizer().save_pretrained(tmp_path / "models")
    return tmp_path


def write(claims: Path, name: str, records: list[dict[str, Any]]) -> None:
    (claims / "data" / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))


def prepared(claims: Path, plan: DataPlan, name: str) -> tuple[SplitFacts, list[list[int]]]:
    """Counts and documents that the trainer makes of the records."""
    with prepare(plan, claims, claims / "models", word_tokenizer(), claims / name, num_workers=0) as preparation:
        assert [finding for finding in preparation.findings if finding.severity == "error"] == []
        preparation.publish()
    train = PreparedData.open(claims / name).train
    return preparation.splits[TRAIN], [[int(token) for token in train.document(number)] for number in range(train.num_documents)]


@pytest.mark.parametrize(
    ("rule", "data_format", "loss_on", "records", "learnt"),
    [
        # All that can be learnt is all tokens but the first, which nothing precedes.
        ("completion-loss-on-text", "Text", "Completion", TEXTS, (7, 7)),
        ("assistant-loss-without-chat", "Text", "Assistant", TEXTS, (7, 7)),
        ("assistant-loss-without-chat", "PromptCompletion", "Assistant", PAIRS, (6, 5)),
    ],
)
def test_a_loss_on_what_records_do_not_have(
    claims: Path, rule: str, data_format: str, loss_on: str, records: list[dict[str, Any]], learnt: tuple[int, int]
):
    """What was asked for is not there, so the trainer would learn every token, prompts included."""
    write(claims, "train.jsonl", records)
    found = plans(rule, {"data.format": data_format, "data.lossOn": loss_on})
    facts = [prepared(claims, plan.data, name)[0] for plan, name in zip(found, ("wrong", "right"), strict=True)]
    assert tuple(each.num_supervised_tokens for each in facts) == learnt
    assert facts[0].num_supervised_tokens == facts[0].num_tokens - facts[0].num_records


@pytest.mark.parametrize(("data_format", "records"), [("Text", TEXTS), ("PromptCompletion", PAIRS)])
def test_a_template_renders_nothing_but_chats(claims: Path, data_format: str, records: list[dict[str, Any]]):
    write(claims, "train.jsonl", records)
    wrong, right = plans("chat-template-without-chat", {"data.format": data_format, "data.chatTemplate": TEMPLATE})
    assert prepared(claims, wrong.data, "wrong")[1] == prepared(claims, right.data, "right")[1]
    write(claims, "train.jsonl", CHATS)
    chats = wrong.data.model_copy(update={"format": DataFormat.CHAT, "loss_on": LossOn.ASSISTANT})
    assert prepared(claims, chats, "chats")[1] == [[6, 2, 3, 6, 4, 5, 0]], "words of the template stand around those of the chat"


def test_a_table_holds_no_chats(claims: Path):
    (claims / "data/chats.csv").write_text("prompt,completion\na b ,c d\n")
    wrong, right = plans("csv-with-chat", {"data.format": "Chat", "data.source": "pvc://data/chats.csv"})
    with prepare(wrong.data, claims, claims / "models", word_tokenizer(), claims / "wrong", num_workers=0) as preparation:
        (finding,) = preparation.findings
    assert "a CSV file cannot hold chats" in finding.message
    assert prepared(claims, right.data, "right")[0].num_records == 1


def test_a_text_file_holds_texts_alone(claims: Path):
    (claims / "data/notes.txt").write_text("a b\nc\n\nd e\n")
    wrong, right = plans("txt-without-text", {"data.format": "Chat", "data.source": "pvc://data/notes.txt"})
    with prepare(wrong.data, claims, claims / "models", word_tokenizer(), claims / "wrong", num_workers=0) as preparation:
        (finding,) = preparation.findings
    assert "a .txt file holds text alone" in finding.message
    assert prepared(claims, right.data, "right")[1] == [[2, 3, 4, 0], [5, 6, 0]]


def test_a_mapping_of_what_the_format_does_not_have(claims: Path):
    """The names are not looked for, and the records are read by the names of the format, or not at all."""
    rule = "mapping-without-effect"
    write(claims, "train.jsonl", [{"prompt": "a ", "completion": "b", "text": "c"}])
    wrong, right = plans(rule, {"data.mapping": {"text": "prompt"}})
    assert prepared(claims, wrong.data, "wrong")[1] == [[2, 3, 0]]
    assert prepared(claims, right.data, "right")[1] == [[2, 0]], "the format that the mapping is of"
    both = {"data.format": "Chat", "data.mapping": {"prompt": "q", "completion": "a", "messages": "m"}}
    assert plans(rule, both)[1].data.mapping.messages == "messages"
    (preset,) = [spec.data.format for spec in specs(rule, {"data.mapping": {"preset": "ShareGPT"}})[1:]]
    assert preset is DataFormat.CHAT


def test_a_word_that_names_no_template_is_one_of_its_own(claims: Path):
    write(claims, "train.jsonl", CHATS)
    wrong, right = plans("chat-template-unknown", {"data.format": "Chat", "data.chatTemplate": "chatml"})
    with prepare(wrong.data, claims, claims / "models", word_tokenizer(), claims / "wrong", num_workers=0) as preparation:
        (finding,) = preparation.findings
    assert "does not write each turn of a plain chat once" in finding.message
    assert "<|im_start|>" in (right.data.chat_template or "")


@pytest.mark.parametrize("weight", ["0", "1000"])
def test_weights_that_leave_out_or_repeat(claims: Path, weight: str):
    """At 0 a data set is left out; at a thousand the run is one of this data set alone."""
    write(claims, "a.jsonl", TEXTS)
    write(claims, "b.jsonl", [{"text": "d e"}])
    sets = [{"source": "pvc://data/a.jsonl"}, {"source": "pvc://data/b.jsonl", "weight": weight}]
    changes = {"data.source": None, "data.format": "Text", "data.datasets": sets}
    wrong, right = plans("dataset-weight-range", changes)
    found = [[int(occurrences(each.weight, np.arange(1)).sum()) for each in plan.data.train] for plan in (wrong, right)]
    assert found == [[1, int(float(weight))], [1, 1]]
    assert prepared(claims, right.data, "right")[0].num_occurrences == 3


def test_training_data_is_named_twice_or_not_at_all(claims: Path):
    rule = "source-or-datasets"
    neither, named = plans(rule, {"data.source": None})
    assert list_sources(neither.data, claims) == []
    write(claims, "train.jsonl", PAIRS)
    assert len(list_sources(named.data, claims)) == 1
    with pytest.raises(KeyError):
        prepared(claims, neither.data, "neither")
    sets = [{"source": "pvc://data/a.jsonl"}]
    both, fixed = plans(rule, {"data.source": "pvc://data/train.jsonl", "data.datasets": sets})
    sources = [[each.source for each in plan.data.train] for plan in (both, fixed)]
    assert sources == [["pvc://data/a.jsonl"]] * 2, "one of the two names is ignored without a word"
    assert [spec.data.source for spec in specs(rule, {"data.source": "pvc://data/x.jsonl", "data.datasets": sets})] == [
        "pvc://data/x.jsonl",
        None,
    ]
