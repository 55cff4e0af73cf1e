"""Rank 0's Prometheus metrics: their names, their meaning, and their values from the state of the run.

`python -m finetune_trainer.observe.metrics` prints their table for the documentation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from finetune_job.progress import Progress
from finetune_trainer.observe.goodput import GoodputTotals

PREFIX = "finetune_training_"
STEP_SECONDS_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the histogram's buckets: from a tiny model to a large one with much accumulation."""


@dataclass(frozen=True)
class Definition:
    """One metric."""

    name: str
    """Name without the prefix, with its unit."""
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    label: str = ""


GAUGES: dict[str, Definition] = {
    field_name: Definition(name, "gauge", text)
    for field_name, name, text in (
        ("step", "step", "Optimizer steps done."),
        ("total_steps", "total_steps", "Optimizer steps of the whole run."),
        ("epoch", "epoch", "Passes over the data done."),
        ("loss", "loss", "Mean loss over the supervised tokens of the latest step."),
        ("eval_loss", "eval_loss", "Mean loss over the supervised held-out tokens, latest evaluation."),
        ("initial_eval_loss", "initial_eval_loss", "Mean loss over the supervised held-out tokens before the first step."),
        ("best_eval_loss", "best_eval_loss", "Lowest mean loss over the supervised held-out tokens since the first step."),
        ("learning_rate", "learning_rate", "Learning rate of the latest step."),
        ("gradient_norm", "gradient_norm", "Norm of the gradients of all trainable parameters before clipping, latest step."),
        (
            "tokens_per_second",
            "tokens_per_second",
            "Tokens of documents per second over all ranks, padding not counted, in the latest 100 steps of this attempt.",
        ),
        ("tokens_per_second_per_device", "tokens_per_second_per_device", "The same divided by the number of ranks."),
        (
            "calculated_tokens_per_second",
            "calculated_tokens_per_second",
            "What the planner calculates for such devices, with parts of their peaks that it assumes; absent if it cannot.",
        ),
        (
            "mfu",
            "mfu_ratio",
            "Operations that the model's mathematics needs over the device's bfloat16 peak; absent if the peak is not known.",
        ),
        (
            "reached_flops_ratio",
            "reached_flops_ratio",
            "The same over what rank 0's device reached in a matrix product before training; absent on a CPU.",
        ),
        ("step_seconds_median", "step_median_seconds", "Median duration of the latest 100 optimizer steps."),
        ("step_seconds_p95", "step_p95_seconds", "95th percentile of the duration of the latest 100 optimizer steps."),
        ("data_wait_ratio", "data_wait_ratio", "Share of the latest 100 steps that rank 0 waited for batches."),
        ("straggler_ratio", "straggler_ratio", "Slowest rank's computing time over the median rank's, latest step."),
        (
            "slowest_device_ratio",
            "slowest_device_ratio",
            "Matrix products per second of the slowest rank's device over the median rank's, before training; absent on a CPU.",
        ),
        ("peak_memory_bytes", "peak_memory_bytes", "Largest memory of a rank so far: of its device, or resident on the CPU."),
        ("goodput", "goodput_ratio", "Share of the time since the first attempt began that went into steps that count."),
        ("seconds_left", "remaining_seconds", "Time to the last step at the pace of the latest steps."),
        ("checkpoint_step", "checkpoint_step", "Step of the latest complete checkpoint."),
        (
            "checkpoint_interval_seconds",
            "checkpoint_interval_seconds",
            "Time between checkpoints as the plan asks for them, at the pace of the latest steps.",
        ),
        (
            "checkpoint_time",
            "last_checkpoint_timestamp_seconds",
            "When the latest checkpoint was complete, or when this attempt began from it; without any, when it began.",
        ),
    )
}
"""Field of Progress -> metric. A field that is None has no sample."""
TOKENS = Definition("tokens", "counter", "Tokens of documents computed by this attempt, padding not counted.")
SUPERVISED_TOKENS = Definition("supervised_tokens", "counter", "Tokens that this attempt was trained to predict.")
CHECKPOINTS = Definition("checkpoints", "counter", "Checkpoints that this attempt has saved.")
FAILED_SAVES = Definition("failed_saves", "counter", "Checkpoints that this attempt could not save.")
PRODUCTIVE = Definition("productive_seconds", "counter", "Time in steps that count, over all attempts.")
BADPUT = Definition(
    "badput_seconds", "counter", "Time that brought no step that counts, over all attempts, by cause.", label="cause"
)
STEP_SECONDS = Definition("step_duration_seconds", "histogram", "Duration of the optimizer steps of this attempt.")
DEFINITIONS = (*GAUGES.values(), TOKENS, SUPERVISED_TOKENS, CHECKPOINTS, FAILED_SAVES, PRODUCTIVE, BADPUT, STEP_SECONDS)


@dataclass(frozen=True)
class Durations:
    """Histogram of durations of steps."""

    counts: tuple[int, ...] = (0,) * (len(STEP_SECONDS_BOUNDS) + 1)
    """Counts by bound, and the count above the last bound."""
    total_seconds: float = 0.0

    def plus(self, seconds: float) -> Durations:
        """The durations with one more step."""
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
    yield _counter(TOKENS, totals.tokens)
    yield _counter(SUPERVISED_TOKENS, totals.supervised_tokens)
    yield _counter(CHECKPOINTS, totals.checkpoints)
    yield _counter(FAILED_SAVES, totals.failed_saves)
    yield _counter(PRODUCTIVE, totals.goodput_totals.productive_seconds)
    badput = CounterMetricFamily(PREFIX + BADPUT.name, BADPUT.text, labels=[BADPUT.label])
    for cause, seconds in totals.goodput_totals.badput_seconds.items():
        badput.add_metric([cause.value], seconds)
    yield badput
    durations = HistogramMetricFamily(PREFIX + STEP_SECONDS.name, STEP_SECONDS.text)
    durations.add_metric([], _buckets(totals.durations.counts), totals.durations.total_seconds)
    yield durations


def _counter(definition: Definition, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + definition.name, definition.text, value=value)


def _buckets(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus writes them."""
    bounds = [*map(str, STEP_SECONDS_BOUNDS), "+Inf"]
    return [(bound, float(sum(counts[: number + 1]))) for number, bound in enumerate(bounds)]


def page() -> str:
    """The metrics as a page of Markdown."""
    rows = "".join(
        f"| `{PREFIX}{definition.name}{'_total' if definition.kind == 'counter' else ''}"
        f"{'{' + definition.label + '}' if definition.label else ''}` | {definition.kind} | {definition.text} |\n"
        for definition in DEFINITIONS
    )
    return (
        "<!-- Generated: python -m finetune_trainer.observe.metrics > docs/reference/trainer-metrics.md -->\n"
        "# Metrics of a training run\n\n"
        "Rank 0 answers at `/metrics` while a job trains. Which job a sample belongs to is told by the labels that Prometheus "
        "adds when it scrapes the pod.\n\n"
        f"| Metric | Type | Meaning |\n| --- | --- | --- |\n{rows}"
    )


if __name__ == "__main__":
    print(page(), end="")
