"""The page: a template filled with the report's summary. All its texts come from outside, so none of them is trusted.

The page runs and loads nothing. The template escapes each text, `shown` cuts it and replaces characters that could hide or
reverse text, and the page's own policy (Content-Security-Policy) lets a browser use only the style sheet with the known digest.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from finetune_job.failures import LATEST_TIME
from finetune_job.names import MANAGED_BY
from finetune_memory.limit import format_bytes
from finetune_trainer.release.commands import base_address
from finetune_trainer.release.facts import RunFacts, TrainingHistory, count_text, table_points
from finetune_trainer.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Series, chart, number
from finetune_trainer.report.document import MAX_LONG_TEXT, MOST_NUMBER, OutcomeOfMerge, RunSummary, TimeOfRun, bounded

MAX_ROWS = 30
"""Maximum number of rows of any table. Together with the limits on texts, it keeps the page below a megabyte."""
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
    """Cut a long text, and turn its hidden characters into replacement characters. Other values are unchanged."""
    return bounded(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def duration(seconds: float | None) -> str:
    """Return a duration as text for people, such as 1 h 05 min, 3 min 20 s, or 4.2 s."""
    if seconds is None or not 0 <= seconds < MOST_NUMBER:
        return "not known"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _date(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds <= LATEST_TIME:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


@cache
def _template() -> tuple[Template, Markup, str]:
    """Return the template, the style sheet, and the digest by which the page's policy names the style sheet."""
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
    filters: dict[str, Callable[[Any], str]] = {
        "long": lambda text: escape(bounded(text, MAX_LONG_TEXT)),
        "count": count_text,
        "short": lambda value: "" if value is None else number(value),
        "bytes": format_bytes,
        "duration": duration,
        "date": _date,
    }
    environment.filters |= filters
    # The style sheet is a constant without untrusted text. Only this text is not escaped.
    return environment.get_template("page.html.j2"), Markup(style), digest  # noqa: S704


def report_page(facts: RunFacts, report: RunSummary) -> str:
    """Return the page of a run. report: the summary of these facts. Equal arguments give equal texts."""
    template, style, digest = _template()
    files = [(file.name or source.source, file.sha256) for source in facts.sources for file in source.files]
    resumed = [attempt.first_step for attempt in report.time.attempts[1:] if attempt.first_step is not None]
    return template.render(
        style=style,
        style_digest=digest,
        maker=MANAGED_BY,
        facts=facts,
        report=report,
        most=MAX_ROWS,
        colour=_COLOURS[report.verdict.outcome],
        charts=charts(facts.history, resumed),
        frame={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        points=table_points(facts.history.points),
        time_rows=time_rows(report.time),
        lengths=[(int(upper), count) for upper, count in report.data.record_lengths.items() if count][:MAX_ROWS],
        base=base_address(facts),
        files=files,
    )


def charts(history: TrainingHistory, resumed: Sequence[float]) -> list[Chart]:
    """Draw a chart of losses and one of gradient norms, if they have values. resumed: steps at which an attempt continued."""
    losses = [
        Series("training loss", history.values("loss")),
        Series("held-out loss", history.values("eval_loss"), has_marks=True),
    ]
    norms = [Series("gradient norm", history.values("gradient_norm"))]
    drawn = (chart("Loss", losses, resumed), chart("Gradient norm", norms, resumed))
    return [drawn_chart for drawn_chart in drawn if drawn_chart is not None]


def time_rows(time: TimeOfRun) -> list[tuple[str, float, float]]:
    """List each activity with its seconds and its share of the total."""
    rows = [("steps that count", time.productive_seconds or 0.0)]
    rows += [(_WORDS.get(cause, cause), seconds or 0.0) for cause, seconds in time.other_seconds.items()]
    total = sum(seconds for _, seconds in rows)
    return [(name, seconds, seconds / total) for name, seconds in rows if seconds > 0 and total > 0]
