"""`finetune audit` and `finetune reproduce`: whether a run of this machine is what it says, by computing it again."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.audit_process import AuditedParts, AuditedPlan, difference, inspect_run, merged_difference
from finetune_cli.local.claims import check_given, claims_of, link_claims, with_places
from finetune_cli.local.known_runs import named_runs
from finetune_cli.local.launch import Interruption, check_trainer
from finetune_cli.local.replay import Interval, Replay, check_ranks, claims_of_run, draw, kept_intervals
from finetune_cli.local.run_directory import RunDirectory, holder_of, read_record
from finetune_cli.local.summary import read_history
from finetune_cli.render.audit import AuditEnd, device_note
from finetune_cli.render.run import LiveView
from finetune_job.api.training import GradientReduction
from finetune_job.catalogue.book import audit_finding
from finetune_job.finding import Finding
from finetune_job.layout import OutputLayout, WorkspaceLayout, checkpoint_name
from finetune_job.names import Role
from finetune_job.plan.digest import text_sha256
from finetune_job.plan.run_plan import RunPlan

_STOPPING = "what is computed again is given up"
_CLAIMS = "claims"
"""Directory of links to the claims of the run."""
_COMPARED = ("tokens", "supervised_tokens", "learning_rate", "loss", "gradient_norm", "eval_loss")
"""Of a line of the history, in the order in which one leads to the next."""
_KEEP = "set spec.checkpoint.keep, and everySteps, in the next job so that more are kept; `finetune reproduce` runs all steps"


@dataclass(frozen=True)
class AuditOrder:
    """Arguments of both commands."""

    run: str
    """Name of a run of this machine, or its directory."""
    claims: Path
    namespace: str | None
    claim_paths: Mapping[str, Path]
    ranks: int | None
    scratch: Path | None = None
    """In which what is computed again is written, and removed; None: where temporary files are."""


@dataclass
class _Audited:
    """A run that has been found, with its plan."""

    place: RunDirectory
    plan: RunPlan
    plan_sha256: str
    claims: Mapping[str, Path]
    findings: list[Finding] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.plan.job.namespace}/{self.plan.job.name}"

    @property
    def workspace(self) -> WorkspaceLayout:
        return WorkspaceLayout(self.claims[self.plan.workspace.claim] / self.plan.workspace.path)

    @property
    def output(self) -> OutputLayout:
        return OutputLayout(self.claims[self.plan.output.claim] / self.plan.output.path)

    def seen_at(self, claims_root: Path) -> AuditedPlan:
        """For the process that looks at it by way of links in this directory."""
        return AuditedPlan(self.place.plan, self.plan_sha256, claims_root)

    @property
    def results(self) -> list[Path]:
        """Directories of what was trained: on the workspace, and where it was published."""
        published = self.output.adapter if self.plan.method.trains_adapter else self.output.merged
        return [place for place in (self.workspace.adapter, published) if place.is_dir()]


def audit(order: AuditOrder, count: int, seed: int | None, console: Console) -> AuditEnd:
    """Compare the parts of a run, and compute drawn intervals between its checkpoints again. Raises LocalError."""
    with _scratch(order) as name, Interruption(stopping=_STOPPING) as interruption:
        scratch = Path(name)
        run = _found(order)
        parts = _look(run, scratch, interruption, console)
        if parts is None or parts.is_refused:
            return AuditEnd(run.title, run.findings)
        ranks = _ranks(run.plan, order, parts)
        available = kept_intervals(parts.steps)
        _say_what_is_not_covered(run, parts, available)
        seed = secrets.randbelow(1 << 32) if seed is None else seed
        drawn = draw(available, count, seed)
        with LiveView(console, run.title) as view:
            for interval in drawn:
                console.print(f"{run.title}: computing {interval} again", markup=False, soft_wrap=True)
                with Replay(run.plan, run.claims, scratch / f"interval-{interval.end}") as replay:
                    replay.take_inputs([checkpoint_name(interval.start)] if interval.start else [])
                    replay.run((Role.TRAIN,), view, interruption, ranks=ranks, until_step=interval.end)
                ours, theirs = (each.checkpoints / checkpoint_name(interval.end) for each in (run.workspace, replay.workspace))
                said = difference("checkpoints", ours, theirs, interruption)
                if said is not None:
                    run.findings.append(_interval_differs(interval, said, _device_note(parts, replay.workspace)))
                shutil.rmtree(replay.place.root)
            if parts.exported_step is not None:
                with Replay(run.plan, run.claims, scratch / "result") as replay:
                    _compare_result(run, parts, replay, view, interruption, ranks=ranks)
        return AuditEnd(run.title, run.findings, drawn, len(available), seed, parts.exported_step is not None)


def reproduce(order: AuditOrder, console: Console) -> AuditEnd:
    """Run the plan of a run again from nothing, and compare what it was trained on and what comes out. Raises LocalError."""
    with _scratch(order) as name, Interruption(stopping=_STOPPING) as interruption:
        scratch = Path(name)
        run = _found(order)
        parts = _look(run, scratch, interruption, console)
        if parts is None or parts.is_refused:
            return AuditEnd(run.title, run.findings)
        ranks = _ranks(run.plan, order, parts)
        if not run.results:
            raise LocalError(f"{run.title}: has no trained result to compare with; let it train to its end with `finetune run`")
        with (
            LiveView(console, run.title) as view,
            Replay(run.plan, run.claims, scratch / "again") as replay,
        ):
            replay.run((Role.PREFLIGHT,), view, interruption, ranks=ranks)
            run.findings += _inputs_differ(run.workspace, replay.workspace)
            is_same_data = not any(finding.severity == "error" for finding in run.findings)
            if is_same_data:
                replay.run((Role.TRAIN,), view, interruption, ranks=ranks)
                step = first_other_step(read_history(run.workspace.history), read_history(replay.workspace.history))
                for place in run.results:
                    said = difference("results", place, replay.workspace.adapter, interruption)
                    if said is not None:
                        when = "" if step is None else f"; the history differs from step {step} on"
                        note = _device_note(parts, replay.workspace)
                        run.findings.append(_result_differs(place, f"is not what the plan gives: {said}{when}{note}"))
            is_merged = is_same_data and run.plan.merge.enabled and _can_be_merged(run)
            if is_merged:
                _compare_merged(run, replay, scratch / _CLAIMS, view, interruption)
        return AuditEnd(run.title, run.findings, has_compared_result=is_same_data, has_compared_merged=is_merged)


def _can_be_merged(run: _Audited) -> bool:
    """Whether there is a merged model that could be the same; if not, a finding says why."""
    merged = run.output.merged
    if any(finding.severity == "error" for finding in run.findings):
        message = f"the adapter differs already, so nothing was merged, and {merged} is not compared"
        fix = "Find out first why the adapter differs"
    elif not merged.is_dir() and not run.output.checksums.is_file():
        message = f"{merged} is not there, so the merged model is not compared"
        fix = "Let the run come to its end with `finetune run`"
    else:
        return True
    run.findings.append(audit_finding("audit-not-proven", field=merged.name, message=message, fix=fix))
    return False


def _compare_merged(run: _Audited, replay: Replay, claims: Path, view: LiveView, interruption: Interruption) -> None:
    """Merge the adapter that came out, which is the run's own."""
    replay.run((Role.MERGE,), view, interruption, ranks=None)
    said = merged_difference(run.seen_at(claims), replay.output.merged, interruption)
    if said is not None:
        run.findings.append(_result_differs(run.output.merged, f"is not what merging gives: {said}"))


def first_other_step(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> int | None:
    """The first step whose lines do not say the same of the training."""
    by_step = {step: line for line in theirs if isinstance(step := line.get("step"), int)}
    for line in ours:
        step = line.get("step")
        if not isinstance(step, int):
            # No training writes such a line.
            continue
        other = by_step.get(step)
        if other is None or any(line.get(name) != other.get(name) for name in _COMPARED):
            return step
    return None


def _scratch(order: AuditOrder) -> tempfile.TemporaryDirectory[str]:
    check_trainer()
    if order.scratch is not None and not order.scratch.is_dir():
        raise LocalError(f"--scratch {order.scratch}: is not a directory; make it, or leave the option out")
    return tempfile.TemporaryDirectory(prefix="finetune-audit-", dir=order.scratch)


def _found(order: AuditOrder) -> _Audited:
    place = RunDirectory(Path(order.run).absolute())
    if not place.is_there:
        runs = named_runs(order.claims, order.run, order.namespace)
        if len(runs) > 1:
            raise LocalError(f"{order.run}: there are {', '.join(run.title for run in runs)}; give --namespace")
        place = runs[0].place
    holder = holder_of(place)
    if holder is not None:
        raise LocalError(f"{place.root}: process {holder.pid} works on this run; wait for its end", ExitCode.FAILED)
    try:
        text = place.plan.read_text()
        plan = RunPlan.model_validate_json(text)
    except (OSError, ValueError) as error:
        raise LocalError(f"{place.plan}: is not the plan of a run ({type(error).__name__})") from error
    check_given(claims_of(plan), order.claim_paths)
    return _Audited(place, plan, text_sha256(text), claims_of_run(place, plan, order.claim_paths))


def _look(run: _Audited, scratch: Path, interruption: Interruption, console: Console) -> AuditedParts | None:
    """What the run left; None if its plan alone refuses it."""
    record = read_record(run.place.record)
    if record is None or record.plan_sha256 != run.plan_sha256:
        known = "" if record is None else record.plan_sha256
        run.findings.append(
            audit_finding(
                "audit-plan-differs",
                field=run.place.plan.name,
                value=known,
                message=f"{run.place.plan} is not the plan that {run.place.record.name} names, but {run.plan_sha256}",
            )
        )
        return None
    console.print(f"{run.title}: comparing plan, data, base model, checkpoints and results", markup=False, soft_wrap=True)
    view = scratch / _CLAIMS
    link_claims(claims_of(run.plan), run.claims, view)
    parts = inspect_run(run.seen_at(view), interruption)
    run.findings += [with_places(finding, view, run.claims) for finding in parts.findings]
    return parts


def _ranks(plan: RunPlan, order: AuditOrder, parts: AuditedParts) -> int | None:
    """As many as were asked for, or as trained last; None: as the plan says. Raises LocalError."""
    check_ranks(plan, order.ranks)
    if plan.training.reduction is not GradientReduction.ORDERED:
        return None
    return order.ranks or min(parts.world_size or 1, plan.parallelism.world_size)


def _say_what_is_not_covered(run: _Audited, parts: AuditedParts, available: Sequence[Interval]) -> None:
    if not available:
        raise LocalError(
            f"{run.title}: {len(parts.steps)} checkpoints were kept, and an interval is between two of them; {_KEEP}",
        )
    if parts.exported_step is None:
        run.findings.append(
            audit_finding(
                "audit-not-proven",
                field=run.workspace.adapter.name,
                message="the run has no trained result yet, so none is compared",
                fix="Let it train to its end with `finetune run`",
            )
        )
    first = available[0].start
    if first:
        run.findings.append(
            audit_finding(
                "audit-not-proven",
                field="spec.checkpoint.keep",
                value=str(run.plan.checkpoint.keep),
                message=f"steps 1 to {first} were before the oldest checkpoint that was kept: they cannot be drawn",
                fix=f"{_KEEP[0].upper()}{_KEEP[1:]}",
            )
        )


def _compare_result(
    run: _Audited, parts: AuditedParts, replay: Replay, view: LiveView, interruption: Interruption, *, ranks: int | None
) -> None:
    """Export the last checkpoint again: a run that resumes from its last step has nothing else to do."""
    steps = dict.fromkeys(step for step in (parts.steps[-1], parts.best_step) if step in parts.steps)
    replay.take_inputs([checkpoint_name(step) for step in steps if step is not None])
    replay.run((Role.TRAIN,), view, interruption, ranks=ranks)
    for place in run.results:
        said = difference("results", place, replay.workspace.adapter, interruption)
        if said is not None:
            run.findings.append(_result_differs(place, f"is not what the last checkpoint gives: {said}"))


def _inputs_differ(ours: WorkspaceLayout, theirs: WorkspaceLayout) -> list[Finding]:
    """What preflight has found otherwise than it did then."""
    if not ours.model_report.is_file():
        return []
    before, now = (json.loads(each.model_report.read_bytes()) for each in (ours, theirs))
    found = []
    if before["data_hash"] != now["data_hash"]:
        found.append(
            audit_finding(
                "audit-data-differs",
                field="spec.data.source",
                value=now["data_hash"],
                message=f"the records give other prepared data than they did, {before['data_hash']}: records, tokenizer or the "
                "libraries that prepare them have changed",
            )
        )
    return found


def _interval_differs(interval: Interval, said: str, note: str) -> Finding:
    return audit_finding(
        "audit-interval-differs",
        field=checkpoint_name(interval.end),
        value=said.partition(" ")[0],
        message=f"{interval}, computed again, end with other values: {said}{note}",
    )


def _result_differs(place: Path, message: str) -> Finding:
    return audit_finding("audit-result-differs", field=place.name, message=f"{place} {message}")


def _device_note(parts: AuditedParts, replayed: WorkspaceLayout) -> str:
    here = {line["device"] for line in read_history(replayed.accounts) if isinstance(line.get("device"), str)}
    return device_note(set(parts.devices), here)
