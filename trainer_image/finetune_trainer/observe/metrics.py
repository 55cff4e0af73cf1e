"""Rank 0's Prometheus metrics: their names and meanings, from metrics.toml, and their values.

`python -m finetune_trainer.observe.metrics` prints a table of the metrics for the documentation.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import accumulate
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from finetune_job.progress import Progress
from finetune_trainer.observe.goodput import GoodputTotals

PREFIX = "finetune_training_"
STEP_SECONDS_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the histogram's buckets. They suit tiny models as well as large ones with much accumulation."""


@dataclass(frozen=True)
class Definition:
    """The definition of one metric."""

    name: str
    """Name without the prefix, with its unit."""
    kind: Literal["gauge", "counter", "histogram"]
    text: str


_TABLES = tomllib.loads(files("finetune_trainer.observe").joinpath("metrics.toml").read_text())
GAUGES = {field_name: Definition(name, "gauge", text) for field_name, (name, text) in _TABLES["gauges"].items()}
"""Field of Progress -> metric."""
COUNTERS = {name: Definition(name, "counter", text) for name, text in _TABLES["counters"].items()}
STEP_SECONDS, BADPUT_SECONDS, CAUSE = "step_duration_seconds", "badput_seconds", "cause"
DEFINITIONS = (*GAUGES.values(), *COUNTERS.values(), Definition(STEP_SECONDS, "histogram", _TABLES["histograms"][STEP_SECONDS]))


@dataclass(frozen=True)
class Durations:
    """Histogram of step durations."""

    counts: tuple[int, ...] = (0,) * (len(STEP_SECONDS_BOUNDS) + 1)
    """Number of steps in each bucket; the last number counts steps above the last bound."""
    total_seconds: float = 0.0

    def plus(self, seconds: float) -> Durations:
        """Return the durations with one more step."""
        place = bisect_left(STEP_SECONDS_BOUNDS, seconds)
        counts = tuple(count + (number == place) for number, count in enumerate(self.counts))
        return Durations(counts, self.total_seconds + seconds)


@dataclass(frozen=True)
class Totals:
    """Counters that only grow while an attempt runs."""

    tokens: int = 0
    supervised_tokens: int = 0
    checkpoints: int = 0
    failed_saves: int = 0
    durations: Durations = field(default_factory=Durations)
    goodput_totals: GoodputTotals = field(default_factory=GoodputTotals)


def families(progress: Progress, totals: Totals) -> Iterator[Metric]:
    """Yield all metrics with their samples."""
    for name, definition in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + definition.name, definition.text)
        value = getattr(progress, name)
        if value is not None:
            gauge.add_metric([], float(value))
        yield gauge
    values = {name: getattr(totals, name) for name in ("tokens", "supervised_tokens", "checkpoints", "failed_saves")}
    values["productive_seconds"] = totals.goodput_totals.productive_seconds
    for name, value in values.items():
        yield CounterMetricFamily(PREFIX + name, COUNTERS[name].text, value=value)
    badput = CounterMetricFamily(PREFIX + BADPUT_SECONDS, COUNTERS[BADPUT_SECONDS].text, labels=[CAUSE])
    for cause, seconds in totals.goodput_totals.badput_seconds.items():
        badput.add_metric([cause.value], seconds)
    yield badput
    durations = HistogramMetricFamily(PREFIX + STEP_SECONDS, DEFINITIONS[-1].text)
    bounds, counts = [*map(str, STEP_SECONDS_BOUNDS), "+Inf"], accumulate(totals.durations.counts)
    buckets = [(bound, float(count)) for bound, count in zip(bounds, counts, strict=True)]
    durations.add_metric([], buckets, totals.durations.total_seconds)
    yield durations


def page() -> str:
    """Return the metrics as a page of Markdown."""
    suffixes = dict.fromkeys(COUNTERS, "_total") | {BADPUT_SECONDS: f"_total{{{CAUSE}}}"}
    rows = "".join(
        f"| `{PREFIX}{definition.name}{suffixes.get(definition.name, '')}` | {definition.kind} | {definition.text} |\n"
        for definition in DEFINITIONS
    )
    return (
        "<!-- Generated: python -m finetune_trainer.observe.metrics > docs/reference/trainer-metrics.md -->\n"
        "# Metrics of a training run\n\n"
        "Rank 0 answers at `/metrics` while a job trains. The labels that Prometheus adds when it scrapes the pod say to which "
        "job a sample belongs.\n\n"
        f"| Metric | Type | Meaning |\n| --- | --- | --- |\n{rows}"
    )


if __name__ == "__main__":
    print(page(), end="")
