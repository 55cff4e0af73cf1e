"""The page: a template filled with what is known of the run. Every text in it is a stranger's: escaped, bounded, visible.

Nothing on the page runs or is loaded. The template escapes each text, `shown` takes away what could hide or turn text around, and
the page's own policy (Content-Security-Policy) lets a browser use the one style sheet in it, which it knows by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
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
from finetune_memory.verdict import limit_of
from finetune_trainer.release.card_sections import chosen_settings, verification_rows
from finetune_trainer.release.commands import (
    base_address,
    convert_adapter,
    convert_merged,
    copy_command,
    serve_adapter,
    serve_merged,
)
from finetune_trainer.release.facts import DataSource, RunFacts, TrainingHistory, table_points
from finetune_trainer.release.write import versions
from finetune_trainer.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Series, chart, number
from finetune_trainer.report.samples import Samples
from finetune_trainer.report.timeline import Timeline, TrainingAttempt

MAX_TEXT, MAX_LONG_TEXT = 300, 1000
"""Characters of any text on the page, and of prompts and answers. With MAX_ROWS they keep it below a megabyte."""
MOST_NUMBER = 1 << 62
"""Of seconds and bytes: what is beyond has been written by nobody who measured it, and is left out."""
MAX_ROWS = 30
"""Of any table: attempts, sources, settings."""
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""Control characters, those that change the direction of writing, those that take no room, and halves of characters."""
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
    """A text as it may be seen: bounded, and each hidden character as a replacement character. Other values as they are."""
    return _cut(value, MAX_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value


def long(value: str) -> Markup:
    """The same with a wider bound, escaped."""
    return escape(_cut(value, MAX_LONG_TEXT))


def _cut(text: str, most: int) -> str:
    return _HIDDEN.sub("\ufffd", text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)")


@cache
def _template() -> tuple[Template, Markup, str]:
    """Template, style sheet, and the digest by which the policy names it."""
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
    # Ours, and part of no text: the one thing that is not escaped.
    return environment.get_template("page.html.j2"), Markup(style), digest  # noqa: S704


def report_page(facts: RunFacts, timeline: Timeline, samples: Samples) -> str:
    """The page of a run whose results are there, or failed their verification. Equal arguments give equal texts."""
    template, style, digest = _template()
    plan, history = facts.plan, facts.history
    warnings = timeline.preflight.warnings if timeline.preflight is not None else ()
    events = [attempt.first_step for attempt in timeline.attempts[1:]]
    return template.render(
        style=style,
        style_digest=digest,
        maker=MANAGED_BY,
        job=plan.job,
        plan=plan,
        facts=facts,
        verdict=verdict(facts),
        losses=held_out_losses(history),
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
        memory=memory(facts, timeline),
        sources=[_source_row(source) for source in facts.sources[:MAX_ROWS]],
        num_sources=len(facts.sources),
        splits=[
            (name, _count(counts, "num_sequences"), _count(counts, "num_tokens"))
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


def has_failed(facts: RunFacts) -> bool:
    """Whether a merged model failed its verification."""
    return facts.verification is not None and not facts.verification.passed


def verdict(facts: RunFacts) -> tuple[str, str]:
    """A class for its colour, and the sentence."""
    if facts.verification is None:
        what = "adapter" if facts.plan.method.trains_adapter else "model"
        return "neutral", f"The {what} was trained. Nothing was merged, so there was nothing to verify."
    if has_failed(facts):
        return "bad", "The merged model failed its verification, so it is not a result. The adapter is whole."
    return "good", "The merged model passed its verification: it computes what base and adapter compute."


def held_out_losses(history: TrainingHistory) -> dict[str, Any] | None:
    """Before, after, best; None if the held-out loss is not known at two moments."""
    evaluations = history.evaluations
    if len(evaluations) < 2:
        return None
    (first_step, first), (last_step, last) = evaluations[0], evaluations[-1]
    best_step, best = min(evaluations, key=lambda entry: entry[1])
    change = (last - first) / first if first else 0.0
    return {
        "first": _four(first),
        "first_step": first_step,
        "last": _four(last),
        "last_step": last_step,
        "best": _four(best),
        "best_step": best_step,
        "change": f"{change:+.1%}",
        "has_fallen": last < first,
        "rises_again": best_step != last_step and last > best * 1.02,
    }


def charts(history: TrainingHistory, events: Sequence[float]) -> list[Chart]:
    """Those of which there are values."""

    def values(name: str) -> list[tuple[float, float]]:
        return [(point.step, value) for point in history.points if (value := getattr(point, name)) is not None]

    held_out = Series("held-out loss", values("eval_loss"), has_marks=True)
    drawn = (
        chart("Loss", [Series("training loss", values("loss")), held_out], events),
        chart("Learning rate", [Series("learning rate", values("learning_rate"))], events),
        chart("Gradient norm", [Series("gradient norm", values("gradient_norm"))], events),
        chart("Tokens per second", [Series("tokens per second", values("tokens_per_second"))], events),
    )
    return [each for each in drawn if each is not None]


def time_rows(timeline: Timeline) -> list[tuple[str, str, float]]:
    """What, how long, and its share of everything."""
    totals = timeline.goodput
    if totals.total_seconds <= 0:
        return []
    rows = [("steps that count", totals.productive_seconds)]
    rows += [(_WORDS.get(cause, cause), seconds) for cause, seconds in totals.badput_seconds.items()]
    return [(name, duration(seconds), seconds / totals.total_seconds) for name, seconds in rows if seconds > 0]


def pace(history: TrainingHistory) -> str:
    """Tokens per second of the median step, and what was calculated; empty if no step has measured them."""
    measured, calculated = history.tokens_per_second, history.calculated_tokens_per_second
    if not measured:
        return ""
    said = f"The median step computed {measured:,.0f} tokens per second."
    if not calculated:
        return f"{said} For its device none were calculated."
    return f"{said} The planner calculates {calculated:,.0f} for its device, {calculated / measured - 1:+.0%}."


def memory(facts: RunFacts, timeline: Timeline) -> dict[str, Any] | None:
    """Estimate, measured peak and limit of a rank; None if neither of the first two is known."""
    found = timeline.preflight.memory if timeline.preflight is not None else {}
    terms = {name: size for name, size in found.items() if 0 < size < MOST_NUMBER}
    estimate, peak, limit = sum(terms.values()), facts.history.peak_memory_bytes, limit_of(facts.plan)
    peak = peak if peak is not None and peak < MOST_NUMBER else None
    if not estimate and peak is None:
        return None
    return {
        "estimate": format_bytes(estimate) if estimate else "",
        "peak": format_bytes(peak) if peak is not None else "",
        "share": f"{peak / estimate:.0%}" if peak is not None and estimate else "",
        "limit": format_bytes(limit.bytes) if limit is not None else "",
        "limit_source": limit.source if limit is not None else "",
        "terms": [(name, format_bytes(size), size / estimate) for name, size in terms.items()][:MAX_ROWS],
    }


def lengths(timeline: Timeline) -> list[tuple[str, str, float]]:
    """Range of tokens, records, and their share of the largest range."""
    found = timeline.preflight.record_lengths if timeline.preflight is not None else {}
    most = max(found.values(), default=0)
    return [
        (f"{upper // 2 + 1:,} to {upper:,}" if upper > 2 else f"up to {upper}", f"{count:,}", count / most)
        for upper, count in sorted(found.items())[:MAX_ROWS]
        if most > 0
    ]


def commands(facts: RunFacts) -> list[tuple[str, str]]:
    """What for, and the line."""
    layout = facts.layout
    found = [("Copy the results here", copy_command(facts))]
    if layout.has_merged:
        found.append(("Serve the merged model with vLLM", serve_merged(facts)))
    if layout.has_adapter:
        found.append(("Serve the adapter with vLLM", serve_adapter(facts)))
    if layout.has_merged:
        found.append(("Convert the merged model for llama.cpp", convert_merged(facts)))
    if layout.has_adapter:
        found.append(("Convert the adapter for llama.cpp", convert_adapter(facts)))
    return [(what, line) for what, line in found if line is not None]


def provenance(facts: RunFacts) -> list[tuple[str, str]]:
    """What proves where the results come from."""
    plan = facts.plan
    rows = [
        ("job", f"{plan.job.namespace}/{plan.job.name}"),
        ("job uid", plan.job.uid),
        ("base model", facts.base_source),
        ("base revision", plan.model.revision or ""),
        ("base digest, SHA-256 over configuration, index, headers and sizes", facts.model_digest or ""),
        ("data, SHA-256", facts.data_hash),
        ("plan, SHA-256", facts.plan_sha256),
        ("what is learnt, SHA-256", facts.learning_sha256),
        ("trainer image", plan.placement.trainer_image if plan.placement is not None else ""),
        ("licence of the base", facts.licence.name or facts.licence.identifier or ", ".join(facts.licence.files)),
        *((f"version of {package}", version) for package, version in versions().items()),
    ]
    return [(name, value) for name, value in rows if value]


def duration(seconds: float) -> str:
    """For people: 1 h 05 min, 3 min 20 s, 4.2 s."""
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
        "counts": [_count(source.counts, name) for name in names],
    }


def _count(counts: Mapping[str, Any], name: str) -> str:
    return f"{counts[name]:,}" if isinstance(counts.get(name), int) else "not counted"


def _four(value: float | None) -> str:
    return "" if value is None else number(value)
