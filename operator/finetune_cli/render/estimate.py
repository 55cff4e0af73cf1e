"""Output of `finetune estimate`: memory of a rank and time of a step, as tables and as data."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from finetune_cli.checks.estimate import JobEstimate
from finetune_cli.render.verdicts import choices_text
from finetune_job.rules.rule import changes_text
from finetune_memory.estimate import Term
from finetune_memory.limit import format_bytes
from finetune_memory.verdict import no_change_suffices


def estimate_text(estimates: list[JobEstimate]) -> str:
    """Return the estimates of all jobs of a manifest as text."""
    return "\n".join(_job(estimate) for estimate in estimates)


def _job(job: JobEstimate) -> str:
    verdict, plan = job.verdict, job.plan
    estimate, limit = verdict.estimate, verdict.limit
    ranks = plan.parallelism.world_size
    place = "device" if estimate.host_terms or (limit is not None and limit.is_device) else "host"
    lines = [
        f"{job.name}: {ranks} rank{'s' if ranks > 1 else ''}; {place} memory of one rank, fullest at {estimate.moment}",
        f"  {job.place}",
        f"  matrix products in {job.precision}",
        "",
    ]
    largest = estimate.largest[0].name if estimate.terms else ""
    lines += [_row(term, is_largest=term.name == largest) for term in estimate.terms]
    lines += [f"  {'total':20} {format_bytes(estimate.total):>11}"]
    if limit is None:
        lines.append("  no limit is known: give --gpu-memory, or a profile with --profile")
    else:
        lines.append(f"  {'limit':20} {format_bytes(limit.bytes):>11}  {limit.source}")
        lines.append(f"  {'fits' if verdict.fits else 'DOES NOT FIT':20} {_difference(estimate.total, limit.bytes):>11}")
    if verdict.choices:
        lines += ["", "  Not set in the manifest, so chosen:", choices_text(verdict.choices)]
    if verdict.alternative is not None:
        lines += ["", f"  It fits with ({format_bytes(verdict.alternative.estimate.total)}):"]
        lines += [f"    {changes_text([change])}" for change in verdict.alternative.changes]
    elif not verdict.fits:
        reason = no_change_suffices(verdict)
        lines += ["", *(f"  {line}" for line in textwrap.wrap(f"{reason[0].upper()}{reason[1:]}.", 100))]
    if estimate.host_terms:
        lines += ["", "  Host memory of one rank, without the page cache of its data:", ""]
        lines += [_row(term, is_largest=False) for term in estimate.host_terms]
        if verdict.host_limit is not None:
            lines.append(f"  {'limit':20} {format_bytes(verdict.host_limit.bytes):>11}  {verdict.host_limit.source}")
            left = _difference(estimate.host_total, verdict.host_limit.bytes)
            lines.append(f"  {'too little' if verdict.exceeds_host else 'fits':20} {left:>11}")
    return "\n".join([*lines, "", *_time(job), ""])


def _time(job: JobEstimate) -> list[str]:
    pace = job.pace
    if pace is None:
        return [f"  Time: not calculated, because {job.pace_problem}"]
    ranks, calibration = pace.ranks, pace.calibration
    parts = f"{calibration.flops:.0%} of its published peak in matrix products, {calibration.attention:.0%} of it in attention"
    lines = [
        f"  Time of a step on {pace.device.name}, calculated. Assumed: {parts},",
        f"  {calibration.memory:.0%} of its memory's peak, and full rows:",
        "",
        *(f"  {term.name:20} {term.seconds:>9.3f} s  {term.detail}" for term in pace.terms),
        f"  {'a step':20} {pace.step_seconds:>9.3f} s  {pace.tokens:,} tokens; limited by {pace.bound}",
        f"  {'tokens per second':20} {pace.tokens_per_second:>11,.0f}"
        + (f"  {pace.tokens_per_second_per_device:,.0f} on each of {ranks}" if ranks > 1 else ""),
    ]
    if job.run_seconds is None:
        lines.append(f"  {'the run':20} {'not known':>11}  give --tokens, the tokens of one pass (finetune data counts them)")
    else:
        cost = "no price is known: set gpu.pricePerHour of the profile" if job.cost is None else f"costs {job.cost:,.2f}"
        hours = f"{job.run_seconds / 3600:,.2f} h"
        lines.append(f"  {'the run':20} {hours:>11}  {job.device_hours:,.2f} device hours; {cost}")
    return lines


def _row(term: Term, *, is_largest: bool) -> str:
    mark = "  <- largest" if is_largest else ""
    return f"  {term.name:20} {format_bytes(term.bytes):>11}  {term.detail}{mark}"


def _difference(total: int, limit: int) -> str:
    return format_bytes(limit - total) + " left" if total <= limit else format_bytes(total - limit) + " over"


def estimate_document(estimates: list[JobEstimate]) -> dict[str, Any]:
    """Return the estimates as plain data; numbers are bytes of one rank, or seconds."""
    return {
        "jobs": [
            {
                "name": estimate.name,
                "ranks": estimate.plan.parallelism.world_size,
                "precision": estimate.precision,
                "fits": estimate.verdict.fits,
                "total": estimate.verdict.estimate.total,
                "limit": None if estimate.verdict.limit is None else estimate.verdict.limit.bytes,
                "moment": estimate.verdict.estimate.moment,
                "terms": [_term(term) for term in estimate.verdict.estimate.terms],
                "host": [_term(term) for term in estimate.verdict.estimate.host_terms],
                "choices": [choice.model_dump(mode="json") for choice in estimate.verdict.choices],
                "alternative": None
                if estimate.verdict.alternative is None
                else {
                    "total": estimate.verdict.alternative.estimate.total,
                    "changes": [change.model_dump(mode="json") for change in estimate.verdict.alternative.changes],
                },
                "time": _time_document(estimate),
            }
            for estimate in estimates
        ]
    }


def _time_document(job: JobEstimate) -> dict[str, Any]:
    pace = job.pace
    if pace is None:
        return {"problem": job.pace_problem}
    return {
        "device": pace.device.name,
        "assumed": asdict(pace.calibration),
        "terms": [{"name": term.name, "seconds": term.seconds, "detail": term.detail} for term in pace.terms],
        "linkSeconds": pace.link_seconds,
        "stepSeconds": pace.step_seconds,
        "tokensPerSecond": pace.tokens_per_second,
        "runSeconds": job.run_seconds,
        "deviceHours": job.device_hours,
        "cost": job.cost,
    }


def _term(term: Term) -> dict[str, Any]:
    return {"name": term.name, "bytes": term.bytes, "detail": term.detail}
