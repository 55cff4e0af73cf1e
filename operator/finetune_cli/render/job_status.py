"""Output of `finetune status` for a job of a cluster: its state, its stages and attempts, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from finetune_cli.exit_codes import ExitCode
from finetune_cli.jobs.diagnosis import Diagnosis
from finetune_cli.jobs.durations import duration_text
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.progress import figures, seconds_between, seconds_left, stage_name, state, timeline
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.jobs.stored_run import StoredCheckpoint
from finetune_cli.render.columns import bar, figure, sparkline, table
from finetune_cli.render.diagnosis import command_lines
from finetune_cli.render.jobs import summary
from finetune_cli.render.verdicts import labelled
from finetune_job.api.status import Attempt
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType
from finetune_operator.decide.failures.restart_policy import Retry, retry_of

_MOST = 500


def status_text(
    job: SeenJob,
    diagnosis: Diagnosis,
    now: datetime,
    losses: Sequence[float] = (),
    checkpoints: Sequence[StoredCheckpoint] | None = None,
) -> str:
    """Return the answer as text.

    losses: losses of the steps so far, if they are known. checkpoints: None if the workspace was not read.
    """
    stage = stage_name(job)
    lines = [f"{plain(job.title)}: {plain(state(job), 128)}" + (f", {stage}" if stage else "")]
    lines += _progress_lines(job, now, losses)
    lines += [labelled("reason", plain(diagnosis.reason, _MOST))] if diagnosis.reason else []
    lines += [labelled("next", plain(advice, _MOST)) for advice in diagnosis.advice[:3]]
    lines += command_lines(diagnosis)
    text = "\n".join(lines) + "\n"
    stages = [
        (each.name, plain(each.state, 40), _clock(each.begun), duration_text(each.seconds), str(len(each.attempts) or ""))
        for each in timeline(job, now)
    ]
    if stages:
        text += "\n" + table(("STAGE", "STATE", "BEGAN", "TOOK", "ATTEMPTS"), stages, "  ")
    tried = [attempt for attempt in job.status.attempts if attempt.role is Role.TRAIN or attempt.outcome is AttemptOutcome.FAILED]
    if len(tried) > 1 or any(attempt.outcome is AttemptOutcome.FAILED for attempt in tried):
        rows = [_attempt_row(attempt, now) for attempt in tried]
        text += "\n" + table(("ATTEMPT", "OUTCOME", "BEGAN", "TOOK", "FAILURE", ""), rows, "  ")
    if checkpoints is not None:
        text += "\n" + _checkpoints_text(checkpoints)
    if job.status.artifacts:
        text += "\n" + table(
            ("RESULT", "PATH"), [(plain(artifact.name), plain(artifact.path)) for artifact in job.status.artifacts], "  "
        )
    if job.unreadable:
        text += f"\n  unreadable status fields, not shown: {', '.join(map(plain, job.unreadable))}\n"
    return text


def _progress_lines(job: SeenJob, now: datetime, losses: Sequence[float]) -> list[str]:
    stats = figures(job)
    if stats is None:
        return []
    left = duration_text(seconds_left(job, now))
    lines = [
        labelled(
            "steps", f"{bar(stats.share)} {stats.step}/{stats.total}  {stats.share:.0%}" + (f"  {left} left" if left else "")
        )
    ]
    before = f", {figure(stats.initial_eval_loss)} before training" if stats.initial_eval_loss is not None else ""
    held_out = f"; held out {figure(stats.eval_loss)}{before}" if stats.eval_loss is not None else before
    if stats.loss is not None or held_out:
        lines.append(labelled("loss", f"{figure(stats.loss)}{held_out}"))
    if losses:
        lines.append(labelled("curve", f"{sparkline(losses)}  {figure(losses[0])} to {figure(losses[-1])}"))
    measured, calculated, beside = stats.tokens_per_second, stats.calculated_tokens_per_second, ""
    if measured and calculated:
        # This shows how far the pace calculated for the device is from the measured one.
        beside = f" (calculated {calculated:.0f}, {calculated / measured - 1:+.0%})"
    pace = [
        *([f"{measured:.0f} tokens/s{beside}"] if measured is not None else []),
        *([f"MFU {stats.mfu:.1%}"] if stats.mfu is not None else []),
        *([f"{stats.goodput:.0%} of the time at work"] if stats.goodput is not None else []),
    ]
    lines += [labelled("pace", ", ".join(pace))] if pace else []
    lines += [labelled("saved", f"checkpoint of step {stats.checkpoint}")] if stats.checkpoint is not None else []
    return lines


def _checkpoints_text(checkpoints: Sequence[StoredCheckpoint]) -> str:
    if not checkpoints:
        return "  the workspace holds no checkpoint\n"
    rows = [
        (
            str(checkpoint.step),
            _clock(checkpoint.saved) or "-",
            f"{checkpoint.bytes / 2**20:.1f} MiB",
            "yes" if checkpoint.is_complete else "no",
            figure(checkpoint.loss),
            figure(checkpoint.eval_loss) + (" (lowest)" if checkpoint.is_best else ""),
        )
        for checkpoint in checkpoints
    ]
    return table(("CHECKPOINT", "SAVED", "SIZE", "COMPLETE", "LOSS", "HELD OUT"), rows, "  ")


def _attempt_row(attempt: Attempt, now: datetime) -> tuple[str, ...]:
    seconds = seconds_between(attempt.start_time, attempt.end_time, now)
    failure = str(attempt.failure or "")
    step = attempt.evidence[0].step if attempt.evidence else 0
    if attempt.failure is not None and not attempt.counted and retry_of(attempt.failure, step) is Retry.UNCOUNTED:
        failure += " (not counted)"
    nodes = "" if attempt.nodes is None else f" on {attempt.nodes} node{'s' * (attempt.nodes != 1)}"
    number = len(attempt.restarts)
    restarts = f", {number} restart{'s' if number > 1 else ''} in its pod" if number else ""
    return (
        f"{attempt.role}-{attempt.number}",
        attempt.outcome + nodes + restarts,
        plain(attempt.start_time.removesuffix("Z").replace("T", " "), 20),
        duration_text(seconds),
        failure,
        plain(attempt.message, 60),
    )


def _clock(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def status_document(
    job: SeenJob,
    diagnosis: Diagnosis,
    now: datetime,
    losses: Sequence[float] = (),
    checkpoints: Sequence[StoredCheckpoint] | None = None,
) -> dict[str, Any]:
    """Return the answer as data; `checkpoints` is null if the workspace was not read."""
    stats = figures(job)
    return {
        **summary(job, now),
        "reason": diagnosis.reason,
        "advice": list(diagnosis.advice),
        "commands": list(diagnosis.commands),
        "tokensPerSecond": stats.tokens_per_second if stats else None,
        "calculatedTokensPerSecond": stats.calculated_tokens_per_second if stats else None,
        "mfu": stats.mfu if stats else None,
        "goodput": stats.goodput if stats else None,
        "checkpointStep": stats.checkpoint if stats else None,
        "losses": list(losses),
        "checkpoints": None
        if checkpoints is None
        else [
            {
                "step": checkpoint.step,
                "saved": None if checkpoint.saved is None else checkpoint.saved.isoformat(),
                "complete": checkpoint.is_complete,
                "bytes": checkpoint.bytes,
                "loss": checkpoint.loss,
                "evalLoss": checkpoint.eval_loss,
                "best": checkpoint.is_best,
            }
            for checkpoint in checkpoints
        ],
        "stages": [
            {
                "name": stage.name,
                "state": stage.state,
                "message": stage.message,
                "began": None if stage.begun is None else stage.begun.isoformat(),
                "seconds": stage.seconds,
                "attempts": [attempt.model_dump(mode="json", by_alias=True) for attempt in stage.attempts],
            }
            for stage in timeline(job, now)
        ],
        "conditions": [condition.model_dump(mode="json", by_alias=True) for condition in job.status.conditions],
        "findings": [finding.model_dump(mode="json") for finding in job.status.findings],
        "artifacts": [artifact.model_dump(mode="json", by_alias=True) for artifact in job.status.artifacts],
    }


def waited_text(name: str, job: SeenJob | None, wanted: ConditionType, code: ExitCode, seconds: float) -> str:
    """Say in one line how a wait ended."""
    if job is None:
        return f"{plain(name)}: the job was deleted\n"
    if code is ExitCode.DONE:
        phase = f" ({job.phase})" if wanted is ConditionType.FINISHED else ""
        return f"{plain(job.title)}: {wanted}{phase}\n"
    stage = stage_name(job)
    place = plain(state(job), 128) + (f", {stage}" if stage else "")
    if code is ExitCode.FAILED:
        return f"{plain(job.title)}: not {wanted} after {duration_text(seconds)}; it is {place}\n"
    return f"{plain(job.title)}: {place}; see `{plain(job.command('explain'), 1000)}`\n"
