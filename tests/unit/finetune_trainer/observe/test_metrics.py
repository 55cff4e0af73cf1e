"""What rank 0 answers, read with Prometheus' own parser over a real socket."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from finetune_job.progress import Progress
from finetune_trainer.observe.goodput import Cause, GoodputTotals
from finetune_trainer.observe.metrics import DEFINITIONS, GAUGES, PREFIX, STEP_SECONDS_BOUNDS, Durations, Totals, page
from finetune_trainer.observe.server import RunMetrics

ROOT = Path(__file__).parents[4]
FULL = Progress(
    attempt=1,
    step=5,
    total_steps=10,
    **{name: 0.25 for name in GAUGES if name not in ("step", "total_steps", "peak_memory_bytes", "checkpoint_step")},
    peak_memory_bytes=2**30,
    checkpoint_step=4,
)
TOTALS = Totals(
    tokens=1000,
    supervised_tokens=600,
    checkpoints=2,
    failed_saves=1,
    durations=Durations().plus(0.3).plus(0.5).plus(700.0),
    goodput_totals=GoodputTotals(60.0, {cause: float(number) for number, cause in enumerate(Cause)}),
)


def scraped(run_metrics: RunMetrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(run_metrics.metrics().decode())}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    (found,) = [
        each.value for family in families.values() for each in family.samples if (each.name, each.labels) == (sample, labels)
    ]
    return found


@pytest.fixture
def run_metrics() -> RunMetrics:
    made = RunMetrics(FULL, lambda: False)
    made.update(TOTALS)
    return made


def test_every_metric_has_its_values(run_metrics: RunMetrics) -> None:
    families = scraped(run_metrics)
    assert set(families) == {PREFIX + each.name for each in DEFINITIONS}
    assert value(families, "finetune_training_mfu_ratio") == 0.25
    assert value(families, "finetune_training_peak_memory_bytes") == 2**30
    assert value(families, "finetune_training_tokens_total") == 1000
    assert value(families, "finetune_training_failed_saves_total") == 1
    assert value(families, "finetune_training_productive_seconds_total") == 60
    assert value(families, "finetune_training_badput_seconds_total", cause="lost_steps") == 1
    assert value(families, "finetune_training_step_duration_seconds_bucket", le="0.25") == 0
    assert value(families, "finetune_training_step_duration_seconds_bucket", le="0.5") == 2
    assert value(families, "finetune_training_step_duration_seconds_bucket", le="+Inf") == 3
    assert value(families, "finetune_training_step_duration_seconds_count") == 3
    assert value(families, "finetune_training_step_duration_seconds_sum") == pytest.approx(700.8)


def test_names_types_and_help_follow_prometheus_conventions(run_metrics: RunMetrics) -> None:
    types = {"gauge", "counter", "histogram"}
    for family in scraped(run_metrics).values():
        assert re.fullmatch(r"finetune_training_[a-z][a-z0-9_]*", family.name)
        assert family.type in types
        assert family.documentation.endswith(".")
        assert not re.search(r"_(total|count|sum|bucket|info|milliseconds|ms|percent)$", family.name)
    assert list(STEP_SECONDS_BOUNDS) == sorted(STEP_SECONDS_BOUNDS)


def test_every_field_of_progress_is_a_metric() -> None:
    assert set(GAUGES) == set(Progress.model_fields) - {"attempt", "restarts"}


def test_what_is_not_known_has_no_sample() -> None:
    families = scraped(RunMetrics(Progress(attempt=0, step=0, total_steps=3), lambda: False))
    assert families["finetune_training_mfu_ratio"].samples == []
    assert value(families, "finetune_training_step") == 0


def test_badput_of_all_attempts_is_known_before_the_first_step(run_metrics: RunMetrics) -> None:
    run_metrics.update(replace(TOTALS, goodput_totals=GoodputTotals(1.0, {Cause.BETWEEN_ATTEMPTS: 7.0})), step=6)
    assert value(scraped(run_metrics), "finetune_training_badput_seconds_total", cause="between_attempts") == 7
    assert run_metrics.progress.step == 6


def test_the_page_is_generated_from_the_definitions() -> None:
    path = ROOT / "docs/reference/trainer-metrics.md"
    assert path.read_text() == page(), "run: python -m finetune_trainer.observe.metrics > docs/reference/trainer-metrics.md"
