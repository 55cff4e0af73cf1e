"""What is known of a run when its results are described: history, curve and table, sources."""

from __future__ import annotations

from finetune_trainer.release.facts import (
    CURVE_WIDTH,
    TABLE_ROWS,
    Point,
    SourceFile,
    sparkline,
    table_points,
    training_history,
)
from tests.unit.finetune_trainer.release.example import BASE_COMMIT, DATA_COMMIT, FROM_HUB, example


def test_lines_that_were_written_again_count_once():
    lines = [{"step": 1, "loss": 3.0, "tokens": 5}, {"step": 2, "loss": 2.0, "tokens": 5}, {"step": 2, "loss": 1.5, "tokens": 5}]
    lines[-1]["calculated_tokens_per_second"] = 12.5
    found = training_history(lines)
    assert [point.loss for point in found.points] == [3.0, 1.5]
    assert (found.tokens, found.calculated_tokens_per_second) == (10, 12.5)


def test_curves_are_short_and_keep_their_ends():
    line = sparkline([float(number) for number in range(1000)])
    assert len(line) == CURVE_WIDTH
    assert (line[0], line[-1]) == ("▁", "█")
    assert sparkline([1.0, 1.0]) == "▁▁"
    points = [Point(step, 1.0, None) for step in range(500)]
    kept = table_points(points)
    assert len(kept) == TABLE_ROWS
    assert (kept[0].step, kept[-1].step) == (0, 499)
    evaluated = [Point(step, 1.0, 2.0 if step % 100 == 0 else None) for step in range(500)]
    assert [point.step for point in table_points(evaluated)] == [0, 100, 200, 300, 400]


def test_a_history_without_numbers_has_no_losses():
    found = training_history([{"step": 0, "eval_loss": 2.5}, {"step": 1, "loss": "nan"}, {"step": "1", "loss": 9.0}, {}])
    assert found.evaluations == [(0, 2.5)]
    assert found.losses == []
    assert (found.tokens, found.supervised_tokens) == (0, 0)


def test_numbers_that_no_trainer_writes_are_left_out():
    lines = [
        {"step": 1, "loss": 10**400, "eval_loss": float("nan"), "tokens": "many"},
        {"step": 2, "loss": float("inf"), "tokens": 5, "peak_memory_bytes": 7, "gradient_norm": 0.5},
        {"step": 3, "peak_memory_bytes": 6},
    ]
    found = training_history(lines)
    assert (found.losses, found.evaluations, found.tokens, found.peak_memory_bytes) == ([], [], 5, 7)
    assert [point.gradient_norm for point in found.points] == [None, 0.5, None]


def test_sources_carry_their_commits_and_digests(tmp_path):
    facts = example(tmp_path, FROM_HUB).facts()
    (source,) = facts.sources
    assert (source.split, source.source, source.revision) == ("train", "hf://datasets/maker/records/train", DATA_COMMIT)
    assert source.files == (SourceFile("a.jsonl", "e" * 64), SourceFile("b.jsonl", "f" * 64))
    assert facts.plan.model.revision == BASE_COMMIT
    assert facts.base_source == "hf://maker/base"


def test_a_base_on_a_claim_is_named_as_the_user_wrote_it(tmp_path):
    facts = example(tmp_path, {"model": {"source": "pvc://models/base"}}).facts()
    assert facts.base_source == "pvc://models/base"
    assert all(source.revision is None for source in facts.sources)
