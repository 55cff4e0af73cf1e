"""What is known of a run when its results are described: its history and the table of it."""

from finetune_trainer.release.facts import TABLE_ROWS, Point, table_points, training_history


def test_lines_that_were_written_again_count_once():
    lines = [{"step": 1, "loss": 3.0, "tokens": 5}, {"step": 2, "loss": 2.0, "tokens": 5}, {"step": 2, "loss": 1.5, "tokens": 5}]
    lines[-1]["calculated_tokens_per_second"] = 12.5
    found = training_history(lines)
    assert [point.loss for point in found.points] == [3.0, 1.5]
    assert (found.tokens, found.calculated_tokens_per_second) == (10, 12.5)


def test_a_table_keeps_its_ends_or_what_was_evaluated():
    kept = table_points([Point(step, 1.0, None) for step in range(500)])
    assert len(kept) == TABLE_ROWS
    assert (kept[0].step, kept[-1].step) == (0, 499)
    evaluated = [Point(step, 1.0, 2.0 if step % 100 == 0 else None) for step in range(500)]
    assert [point.step for point in table_points(evaluated)] == [0, 100, 200, 300, 400]


def test_a_history_without_numbers_has_no_losses():
    found = training_history([{"step": 0, "eval_loss": 2.5}, {"step": 1, "loss": "nan"}, {"step": "1", "loss": 9.0}, {}])
    assert found.values("eval_loss") == [(0, 2.5)]
    assert found.values("loss") == []
    assert (found.tokens, found.supervised_tokens) == (0, 0)


def test_numbers_that_no_trainer_writes_are_left_out():
    lines = [
        {"step": 1, "loss": 10**400, "eval_loss": float("nan"), "tokens": "many"},
        {"step": 2, "loss": float("inf"), "tokens": 5, "peak_memory_bytes": 7, "gradient_norm": 0.5},
        {"step": 3, "peak_memory_bytes": 6},
    ]
    found = training_history(lines)
    assert (found.values("loss"), found.values("eval_loss"), found.tokens, found.peak_memory_bytes) == ([], [], 5, 7)
    assert [point.gradient_norm for point in found.points] == [None, 0.5, None]
