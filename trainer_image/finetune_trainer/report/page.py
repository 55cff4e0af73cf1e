"""The page: a template filled with the facts of the run. Every text in it comes from outside: escaped, bounded, visible.

Nothing on the page runs or is loaded. The template escapes each text, `shown` replaces characters that could hide or reverse
text, and the page's own policy (Content-Security-Policy) lets a browser use only the style sheet with the known digest.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from finetune_job.failures import LATEST_TIME
from finetune_job.names import MANAGED_BY
from finetune_memory.limit import format_bytes
from finetune_trainer.release.card_sections import chosen_settings, verification_rows
from finetune_trainer.release.commands import base_address
from finetune_trainer.release.facts import DataSource, RunFacts, TrainingHistory, count_text, table_points
from finetune_trainer.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Series, chart, number
from finetune_trainer.report.document import MAX_LONG_TEXT, MOST_NUMBER, HeldOutLoss, MemoryOfRank, OutcomeOfMerge, bounded
from finetune_trainer.report.samples import Samples
from finetune_trainer.report.summary import (
    commands,
    has_failed,
    held_out_loss,
    memory,
    provenance,
    verdict,
)
from finetune_trainer.report.timeline import Timeline, TrainingAttempt

MAX_ROWS = 30
"""Rows of any table: attempts, sources, settings. With the bounds of texts they keep the page below a megabyte."""
_COLOURS = {OutcomeOfMerge.PASSED: "good", OutcomeOfMerge.FAILED: "bad", OutcomeOfMerge.NOT_MERGED: "neutral"}
_WORDS = {
    "lost_steps": "steps done again after a restart",
    "between_attempts": "between attempts",
    "startup": "start-up: imports, loading, joining the gang",
    "checkpoint": "waiting for checkpoints",
    "evaluation": "evaluation",
    "data_wait": "waiting for data",
    "export": "export",
    "other": "other",
}


def shown(value: Any) -> Any:
    """A text made fit to be shown: bounded, with each hidden character as a replacement character. Other values are unchanged."""
    return bounded(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def long(value: str) -> Markup:
    """A text as in `shown`, with a wider bound, and escaped."""
    return escape(bounded(value, MAX_LONG_TEXT))


@cache
def _template() -> tuple[Template, Markup, str]:
    """Template, style sheet, and the digest with which the policy names it."""
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["long"] = long
    # A constant without foreign text, and the only one that is not escaped.
    return environment.get_template("page.html.j2"), Markup(style), digest  # noqa: S704


def report_page(facts: RunFacts, timeline: Timeline, samples: Samples) -> str:
    """The page of a run that has results, or failed their verification. Equal arguments give equal texts."""
    template, style, digest = _template()
    plan, history, run_verdict = facts.plan, facts.history, verdict(facts)
    warnings = timeline.preflight.warnings if timeline.preflight is not None else ()
    events = [attempt.first_step for attempt in timeline.attempts[1:]]
    return template.render(
        style=style,
        style_digest=digest,
        maker=MANAGED_BY,
        job=plan.job,
        plan=plan,
        facts=facts,
        verdict=(_COLOURS[run_verdict.outcome], run_verdict.text),
        losses=losses(held_out_loss(history)),
        charts=charts(history, events),
        frame={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        curve_rows=[
            (f"{point.step:,}", *map(_four, (point.loss, point.eval_loss, point.learning_rate)))
            for point in table_points(history.points)
        ],
        samples=samples,
        attempts=[_attempt_row(attempt) for attempt in timeline.attempts[:MAX_ROWS]],
        num_attempts=len(timeline.attempts),
        lost_steps=timeline.lost_steps,
        goodput=timeline.goodput.goodput,
        pace=pace(history),
        time_rows=time_rows(timeline),
        memory=memory_rows(memory(facts, timeline)),
        sources=[_source_row(source) for source in facts.sources[:MAX_ROWS]],
        num_sources=len(facts.sources),
        splits=[
            (name, count_text(counts, "num_sequences"), count_text(counts, "num_tokens"))
            for name, counts in islice(facts.splits.items(), MAX_ROWS)
        ],
        lengths=lengths(timeline),
        warnings=warnings[:MAX_ROWS],
        num_warnings=len(warnings),
        verification=verification_rows(facts.verification) if facts.verification is not None else [],
        has_failed=has_failed(facts),
        faults=facts.verification.faults[:MAX_ROWS] if has_failed(facts) and facts.verification is not None else (),
        commands=commands(facts),
        notes=facts.serving.notes if facts.serving is not None else (),
        refusals=facts.serving.reasons if facts.serving is not None else (),
        base=base_address(facts),
        settings=chosen_settings(plan)[: 2 * MAX_ROWS],
        choices=plan.choices[:MAX_ROWS],
        num_choices=len(plan.choices),
        provenance=provenance(facts),
        files=[(source.source, file.name or source.source, file.sha256) for source in facts.sources for file in source.files][
            :MAX_ROWS
        ],
        num_files=sum(len(source.files) for source in facts.sources),
    )


def charts(history: TrainingHistory, events: Sequence[float]) -> list[Chart]:
    """Charts of the series that have values."""

    def values(name: str) -> list[tuple[float, float]]:
        return [(point.step, value) for point in history.points if (value := getattr(point, name)) is not None]

    held_out = Series("held-out loss", values("eval_loss"), has_marks=True)
    drawn = (
        chart("Loss", [Series("training loss", values("loss")), held_out], events),
        chart("Learning rate", [Series("learning rate", values("learning_rate"))], events),
        chart("Gradient norm", [Series("gradient norm", values("gradient_norm"))], events),
        chart("Tokens per second", [Series("tokens per second", values("tokens_per_second"))], events),
    )
    return [drawn_chart for drawn_chart in drawn if drawn_chart is not None]


def time_rows(timeline: Timeline) -> list[tuple[str, str, float]]:
    """Activity, duration, and share of the total."""
    totals = timeline.goodput
    if totals.total_seconds <= 0:
        return []
    rows = [("steps that count", totals.productive_seconds)]
    rows += [(_WORDS.get(cause, cause), seconds) for cause, seconds in totals.badput_seconds.items()]
    return [(name, duration(seconds), seconds / totals.total_seconds) for name, seconds in rows if seconds > 0]


def pace(history: TrainingHistory) -> str:
    """Tokens per second of the median step, and the calculated figure; empty if no step has measured them."""
    measured, calculated = history.tokens_per_second, history.calculated_tokens_per_second
    if not measured:
        return ""
    measured_text = f"The median step computed {measured:,.0f} tokens per second."
    if not calculated:
        return f"{measured_text} The planner calculates none for its device."
    return f"{measured_text} The planner calculates {calculated:,.0f} for its device, {calculated / measured - 1:+.0%}."


def memory_rows(usage: MemoryOfRank | None) -> dict[str, Any] | None:
    """Sizes for people."""
    if usage is None:
        return None
    estimate, peak = usage.estimate, usage.peak
    return {
        "estimate": format_bytes(estimate) if estimate else "",
        "peak": format_bytes(peak) if peak is not None else "",
        "share": f"{peak / estimate:.0%}" if peak is not None and estimate else "",
        "limit": format_bytes(usage.limit) if usage.limit is not None else "",
        "limit_source": usage.limit_source,
        "terms": [(name, format_bytes(size), size / estimate) for name, size in usage.terms.items() if estimate][:MAX_ROWS],
    }


def losses(held_out: HeldOutLoss | None) -> dict[str, Any] | None:
    """Held-out losses for people."""
    if held_out is None:
        return None
    moments = {"first": held_out.first, "last": held_out.last, "best": held_out.best}
    return {
        **{name: _four(moment.loss) for name, moment in moments.items()},
        **{f"{name}_step": moment.step for name, moment in moments.items()},
        "change": f"{held_out.change:+.1%}" if held_out.change is not None else "",
        "has_fallen": held_out.has_fallen,
        "rises_again": held_out.rises_again,
    }


def lengths(timeline: Timeline) -> list[tuple[str, str, float]]:
    """Range of tokens, number of records, and their share of the largest range."""
    counts = timeline.preflight.record_lengths if timeline.preflight is not None else {}
    most = max(counts.values(), default=0)
    return [
        (f"{upper // 2 + 1:,} to {upper:,}" if upper > 2 else f"up to {upper}", f"{count:,}", count / most)
        for upper, count in sorted(counts.items())[:MAX_ROWS]
        if most > 0
    ]


def duration(seconds: float) -> str:
    """A duration for people: 1 h 05 min, 3 min 20 s, 4.2 s."""
    if not 0 <= seconds < MOST_NUMBER:
        return "not known"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _attempt_row(attempt: TrainingAttempt) -> dict[str, Any]:
    is_date = 0 <= attempt.start <= LATEST_TIME
    return {
        "number": attempt.number,
        "start": datetime.fromtimestamp(attempt.start, UTC).strftime("%Y-%m-%d %H:%M:%S") if is_date else "",
        "duration": duration(attempt.seconds),
        "steps": f"{attempt.first_step:,} to {attempt.last_step:,}",
        "lost": f"{attempt.lost_steps:,}",
        "ending": attempt.ending,
        "message": attempt.message,
    }


def _source_row(source: DataSource) -> dict[str, Any]:
    names = ("num_records", "num_dropped", "num_repeated", "num_tokens", "num_supervised_tokens")
    return {
        "source": source.source,
        "revision": source.revision or "",
        "split": source.split,
        "weight": f"{source.weight:g}",
        "counts": [count_text(source.counts, name) for name in names],
    }


def _four(value: float | None) -> str:
    return "" if value is None else number(value)
