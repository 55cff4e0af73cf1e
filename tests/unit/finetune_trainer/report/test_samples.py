"""Which held-out records are asked about, where their prompts end, and what is said if there are no answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import PreparedDataError, SplitArrays
from finetune_trainer.report import samples
from finetune_trainer.report.samples import Question, question_of, questions, sample_answers, stop_tokens
from finetune_trainer.verify.generation import TooLargeError
from tests.unit.finetune_trainer.release.example import example, prepared_facts


@pytest.mark.parametrize(
    ("tokens", "supervised", "expected"),
    [
        ([5, 6, 7, 8], "..xx", ([5, 6], [7, 8])),
        # The first answer of a chat, not what follows it.
        ([5, 6, 7, 8, 9, 1], "..x..x", ([5, 6], [7])),
        # A text that is learnt from its beginning is cut in the middle, a long one after 32 tokens.
        ([5, 6, 7, 8], ".xxx", ([5, 6], [7, 8])),
        (list(range(100)), "." + 99 * "x", (list(range(32)), list(range(32, 100)))),
        # Nothing to say, nothing to ask, and too much to ask.
        ([5, 6], "..", None),
        ([5], "x", None),
        (list(range(258)), 257 * "." + "x", None),
        (list(range(257)), 256 * "." + "x", (list(range(256)), [256])),
    ],
)
def test_a_record_is_cut_where_its_answer_begins(tokens: list[int], supervised: str, expected: Any) -> None:
    found = question_of(3, tokens, [mark == "x" for mark in supervised])
    assert found == (None if expected is None else Question(3, *expected))


def split_of(lengths: list[int]) -> SplitArrays:
    """Documents of these lengths, the last token of each an answer."""
    ends = np.cumsum(lengths)
    supervised = np.zeros(sum(lengths), dtype=bool)
    supervised[ends - 1] = True
    counts = np.ones(len(lengths), dtype=np.int64)
    return SplitArrays(np.arange(sum(lengths), dtype=np.int32), supervised, ends, np.arange(1, len(lengths) + 1), counts)


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ([4] * 10, 3, [0, 1, 2]),
        ([4] * 96, 3, [0, 32, 64]),
        ([4] * 32 + [300] * 32 + [4] * 32, 3, [0, 2, 64]),
        ([300] * 40, 3, []),
        ([4], 3, [0]),
    ],
    ids=["few", "spread", "long ones passed over", "none", "one"],
)
def test_records_are_far_apart_and_the_same_each_time(lengths: list[int], most: int, expected: list[int]) -> None:
    split = PreparedSplit.of(split_of(lengths), 0)
    assert [question.record for question in questions(split, most)] == expected


def test_generation_stops_where_the_models_files_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert stop_tokens(tmp_path, 2) == {2, 5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8, null, "x"]}')
    assert stop_tokens(tmp_path, 2) == {2, 5, 7, 8}


HELD_OUT = {"data.validation": {"source": "pvc://data/held-out"}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({}, "nothing was held out"), (HELD_OUT | {"output.destination": "hf://team/tuned"}, "spec.output.sampleAnswers is 0")],
)
def test_there_are_none_if_the_plan_says_so(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    found = sample_answers(example(tmp_path, changes).context)
    assert found.answers == ()
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TooLargeError("15 GiB"), "the model is too large for them: 15 GiB"),
        (KeyError("weight"), "they could not be computed (KeyError); the log of the merge says why"),
    ],
)
def test_what_goes_wrong_costs_a_text_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def failing(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(samples, "_answers", failing)
    assert sample_answers(example(tmp_path, HELD_OUT).context).reason == reason


def test_the_held_out_records_alone_are_read_and_proven(tmp_path: Path) -> None:
    facts = prepared_facts()
    facts["splits"]["validation"] = {"num_sequences": 3}
    write_prepared(tmp_path / "prepared", {"train": split_of([4] * 4), "validation": split_of([2, 3, 4])}, facts)
    split = PreparedSplit.open_held_out(tmp_path / "prepared")
    assert split is not None
    assert split.marked_document(1) == ([2, 3, 4], [False, False, True])
    without = prepared_facts()
    write_prepared(tmp_path / "without", {"train": split_of([4])}, without)
    assert PreparedSplit.open_held_out(tmp_path / "without") is None
    (tmp_path / "prepared/validation/tokens-00000.i4").write_bytes(b"other")
    with pytest.raises(PreparedDataError, match="has 5 bytes"):
        PreparedSplit.open_held_out(tmp_path / "prepared")
