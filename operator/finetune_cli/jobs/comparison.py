"""Two jobs side by side: what their manifests ask for differently, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from finetune_cli.jobs.progress import device_seconds, figures, seconds_between, state
from finetune_cli.jobs.seen import SeenJob

NOT_SET = "not set"


@dataclass(frozen=True)
class Difference:
    """A setting or a figure of two jobs."""

    name: str
    first: str
    second: str


def settings(job: SeenJob) -> dict[str, str]:
    """Every setting of the spec and every choice of the plan, by its path, as JSON; those of `spec.run` apart."""
    found = {path: text for path, text in _leaves("spec", job.spec) if not path.startswith("spec.run.")}
    if job.status.plan is not None:
        found |= {choice.field: choice.value for choice in job.status.plan.choices if choice.field not in found}
    return found


def _leaves(path: str, content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, Mapping) and content:
        for key, each in content.items():
            yield from _leaves(f"{path}.{key}", each)
    else:
        yield path, json.dumps(content, ensure_ascii=False, sort_keys=True)


def differences(first: SeenJob, second: SeenJob) -> list[Difference]:
    """Settings that are not the same, in the order of their paths."""
    one, other = settings(first), settings(second)
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return [Difference(name, one.get(name, NOT_SET), other.get(name, NOT_SET)) for name in names]


def outcomes(first: SeenJob, second: SeenJob, now: datetime) -> list[Difference]:
    """What both came to, the same or not."""
    one, other = _outcome(first, now), _outcome(second, now)
    return [Difference(name, one[name], other[name]) for name in one]


def _outcome(job: SeenJob, now: datetime) -> dict[str, str]:
    found, plan = figures(job), job.status.plan
    seconds = seconds_between(job.status.start_time, job.status.completion_time, now)

    def shown(value: float | None, form: str = ".4g") -> str:
        return "-" if value is None else format(value, form)

    return {
        "state": state(job),
        "steps": "-" if found is None else f"{found.step}/{found.total}",
        "loss": shown(found.loss if found else None),
        "held-out loss": shown(found.eval_loss if found else None),
        "held-out loss before": shown(found.initial_eval_loss if found else None),
        "tokens/s": shown(found.tokens_per_second if found else None, ".0f"),
        "hours": shown(None if seconds is None else seconds / 3600, ".2f"),
        "device hours": shown(device_seconds(job, now) / 3600, ".2f"),
        "attempts": str(len(job.status.attempts)),
        "data": "-" if plan is None or not plan.data_hash else plan.data_hash[:12],
        "model": "-" if plan is None or not plan.model_digest else plan.model_digest[:12],
        "image": "-" if plan is None or not plan.trainer_image else plan.trainer_image,
    }
