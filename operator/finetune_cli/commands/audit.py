"""`finetune audit` and `finetune reproduce`: check a run on this machine by computing some or all of it again."""

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
from finetune_cli.jobs.reproduction import data_differs, has_error
from finetune_cli.local.claims import check_given, claims_of, link_claims, with_places
from finetune_cli.local.known_runs import named_runs
from finetune_cli.local.launch import Interruption, answer_of, check_trainer, trainer_command
from finetune_cli.local.replay import Replay, check_ranks, claims_of_run, draw, kept_intervals
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

_STOPPING = "the recomputation is stopped"
_KEEP = "in the next job, keep more checkpoints (spec.checkpoint.keep, everySteps); `finetune reproduce` recomputes all steps"


@dataclass(frozen=True)
class AuditOrder:
    """Arguments that `audit` and `reproduce` share."""

    run: str
    """Name of a run on this machine, or its directory."""
    claims: Path
    namespace: str | None
    claim_paths: Mapping[str, Path]
    ranks: int | None


@dataclass
class _Audited:
    """A run, its plan, and what the trainer's audit process found about its parts."""

    place: RunDirectory
    plan: RunPlan
    plan_sha256: str
    claims: Mapping[str, Path]
    findings: list[Finding] = field(default_factory=list)
    checkpoints: Sequence[Mapping[str, Any]] = ()
    """The valid checkpoints in order, each with `step`, `world_size` and `best_step`."""
    exported_step: int | None = None
    """Step of the trained result; None: the run has none yet."""
    devices: Sequence[str] = ()

    @property
    def title(self) -> str:
        return f"{self.plan.job.namespace}/{self.plan.job.name}"

    @property
    def workspace(self) -> WorkspaceLayout:
        return WorkspaceLayout(self.claims[self.plan.workspace.claim] / self.plan.workspace.path)

    @property
    def output(self) -> OutputLayout:
        return OutputLayout(self.claims[self.plan.output.claim] / self.plan.output.path)

    @property
    def results(self) -> list[Path]:
        """Existing directories with the trained result: on the workspace, and in the output."""
        published = self.output.adapter if self.plan.method.trains_adapter else self.output.merged
        return [place for place in (self.workspace.adapter, published) if place.is_dir()]

    def add(self, rule: str, **facts: str) -> None:
        """Add a finding."""
        self.findings.append(audit_finding(rule, **facts))

    def note(self, again: WorkspaceLayout) -> str:
        """Return a note on whether different devices alone may explain a difference in the recomputed files."""
        here = {line["device"] for line in read_history(again.accounts) if isinstance(line.get("device"), str)}
        return device_note(set(self.devices), here)

    def compare(self, places: Sequence[Path], again: Path, interruption: Interruption, note: str = "") -> None:
        """Add a finding for each of `places` that differs from the recomputed `again`. note: what may explain the difference."""
        for place in places:
            difference = _difference("results", place, again, interruption)
            if difference is not None:
                message = f"{place} differs from the recomputed result: {difference}{note}"
                self.add("audit-result-differs", field=place.name, message=message)


def audit(order: AuditOrder, count: int, seed: int | None, console: Console) -> AuditEnd:
    """Compare the parts of a run, and recompute randomly chosen intervals between its checkpoints. Raises LocalError."""
    check_trainer()
    with tempfile.TemporaryDirectory(prefix="finetune-audit-") as name, Interruption(stopping=_STOPPING) as interruption:
        scratch = Path(name)
        run = _inspected(order, scratch, interruption, console)
        if has_error(run.findings):
            return AuditEnd(run.title, run.findings)
        ranks = _ranks(run, order)
        steps = [checkpoint["step"] for checkpoint in run.checkpoints]
        available = kept_intervals(steps)
        if not available:
            raise LocalError(f"{run.title}: {len(steps)} checkpoints were kept, and an interval is between two of them; {_KEEP}")
        if run.exported_step is None:
            message = "the run has no trained result yet, so none is compared"
            fix = "Let it train to its end with `finetune run`"
            run.add("audit-not-proven", field=run.workspace.adapter.name, message=message, fix=fix)
        if available[0].start:
            run.add(
                "audit-not-proven",
                field="spec.checkpoint.keep",
                value=str(run.plan.checkpoint.keep),
                message=f"steps 1 to {available[0].start} precede the oldest kept checkpoint, so they cannot be checked",
                fix=f"{_KEEP[0].upper()}{_KEEP[1:]}",
            )
        seed = secrets.randbelow(1 << 32) if seed is None else seed
        drawn = draw(available, count, seed)
        with LiveView(console, run.title) as view:
            for interval in drawn:
                console.print(f"{run.title}: computing {interval} again", markup=False, soft_wrap=True)
                end = checkpoint_name(interval.end)
                with Replay(run.plan, run.claims, scratch / f"interval-{interval.end}") as replay:
                    replay.take_inputs([checkpoint_name(interval.start)] if interval.start else [])
                    replay.run((Role.TRAIN,), view, interruption, ranks=ranks, until_step=interval.end)
                ours, theirs = run.workspace.checkpoints / end, replay.workspace.checkpoints / end
                difference = _difference("checkpoints", ours, theirs, interruption)
                if difference is not None:
                    message = f"{interval}, recomputed, end with different values: {difference}{run.note(replay.workspace)}"
                    run.add("audit-interval-differs", field=end, value=difference.partition(" ")[0], message=message)
                shutil.rmtree(replay.place.root)
            if run.exported_step is not None:
                # A run that resumes at its last step only exports that step again, so the result is compared without training.
                latest, best = steps[-1], run.checkpoints[-1].get("best_step")
                exported = [latest, *([best] if isinstance(best, int) and best in steps and best != latest else [])]
                with Replay(run.plan, run.claims, scratch / "result") as replay:
                    replay.take_inputs([checkpoint_name(step) for step in exported])
                    replay.run((Role.TRAIN,), view, interruption, ranks=ranks)
                    run.compare(run.results, replay.workspace.adapter, interruption)
        return AuditEnd(run.title, run.findings, drawn, len(available), seed, run.exported_step is not None)


def reproduce(order: AuditOrder, console: Console) -> AuditEnd:
    """Run the plan of a run again from the start, and compare the data and the results. Raises LocalError."""
    check_trainer()
    with tempfile.TemporaryDirectory(prefix="finetune-audit-") as name, Interruption(stopping=_STOPPING) as interruption:
        scratch = Path(name)
        run = _inspected(order, scratch, interruption, console)
        if has_error(run.findings):
            return AuditEnd(run.title, run.findings)
        ranks = _ranks(run, order)
        if not run.results:
            raise LocalError(f"{run.title} has no trained result to compare with; let it train to its end with `finetune run`")
        with LiveView(console, run.title) as view, Replay(run.plan, run.claims, scratch / "again") as replay:
            replay.run((Role.PREFLIGHT,), view, interruption, ranks=ranks)
            if run.workspace.model_report.is_file():
                reports = (json.loads(each.model_report.read_bytes()) for each in (run.workspace, replay.workspace))
                run.findings += data_differs(*(report["data_hash"] for report in reports))
            if has_error(run.findings):
                return AuditEnd(run.title, run.findings)
            replay.run((Role.TRAIN,), view, interruption, ranks=ranks)
            run.compare(run.results, replay.workspace.adapter, interruption, run.note(replay.workspace))
            merged, differs = run.output.merged, has_error(run.findings)
            is_merged = run.plan.merge.enabled and not differs and merged.is_dir()
            if is_merged:
                # The replay merges its own adapter, which is equal to the run's.
                replay.run((Role.MERGE,), view, interruption, ranks=None)
                run.compare([merged], replay.output.merged, interruption)
            elif run.plan.merge.enabled:
                message, fix = (
                    f"{merged} does not exist, so the merged model is not compared",
                    "Run it to its end with `finetune run`",
                )
                if differs:
                    message = f"the adapter differs already, so nothing was merged, and {merged} is not compared"
                    fix = "First find out why the adapter differs"
                run.add("audit-not-proven", field=merged.name, message=message, fix=fix)
        return AuditEnd(run.title, run.findings, has_compared_result=True, has_compared_merged=is_merged)


def _inspected(order: AuditOrder, scratch: Path, interruption: Interruption, console: Console) -> _Audited:
    """Find the run, and compare its parts by their digests unless its plan already differs. Raises LocalError."""
    place = RunDirectory(Path(order.run).absolute())
    if not place.is_there:
        runs = named_runs(order.claims, order.run, order.namespace)
        if len(runs) > 1:
            raise LocalError(f"{order.run}: there are {', '.join(run.title for run in runs)}; give --namespace")
        place = runs[0].place
    holder = holder_of(place)
    if holder is not None:
        raise LocalError(f"{place.root}: process {holder.pid} is working on this run; wait for its end", ExitCode.FAILED)
    try:
        text = place.plan.read_text()
        plan = RunPlan.model_validate_json(text)
    except (OSError, ValueError) as error:
        raise LocalError(f"{place.plan} is not the plan of a run ({type(error).__name__})") from error
    uses = claims_of(plan)
    check_given(uses, order.claim_paths)
    run = _Audited(place, plan, text_sha256(text), claims_of_run(place, plan, order.claim_paths))
    record = read_record(place.record)
    if record is None or record.plan_sha256 != run.plan_sha256:
        known = "" if record is None else record.plan_sha256
        message = f"{place.plan} is not the plan that {place.record.name} names, but {run.plan_sha256}"
        run.add("audit-plan-differs", field=place.plan.name, value=known, message=message)
        return run
    console.print(f"{run.title}: comparing plan, data, base model, checkpoints and results", markup=False, soft_wrap=True)
    links = scratch / "claims"
    link_claims(uses, run.claims, links)
    arguments = ["--plan", str(place.plan), "--plan-sha256", run.plan_sha256, "--claims-root", str(links)]
    parts = _answer(["look", *arguments], interruption)
    findings = (Finding.model_validate(finding) for finding in parts["findings"])
    run.findings += [with_places(finding, links, run.claims) for finding in findings]
    run.checkpoints, run.exported_step, run.devices = parts["checkpoints"], parts["exported_step"], parts["devices"]
    return run


def _ranks(run: _Audited, order: AuditOrder) -> int | None:
    """Return the requested number of ranks, else the number that trained last; None: the plan's number. Raises LocalError."""
    check_ranks(run.plan, order.ranks)
    if run.plan.training.reduction is not GradientReduction.ORDERED:
        return None
    last = run.checkpoints[-1].get("world_size") if run.checkpoints else None
    return order.ranks or min(last or 1, run.plan.parallelism.world_size)


def _difference(what: str, expected: Path, other: Path, interruption: Interruption) -> str | None:
    """Return the first difference between two directories. what: `checkpoints` or `results`. Raises LocalError."""
    answer = _answer([what, "--expected", str(expected), "--found", str(other)], interruption)["difference"]
    return None if answer is None else str(answer)


def _answer(arguments: Sequence[str], interruption: Interruption) -> dict[str, Any]:
    """Run the trainer's audit process, and return its answer. Raises LocalError."""
    ended = answer_of(trainer_command("finetune_trainer.roles.audit", *arguments), interruption)
    if interruption.requested:
        raise LocalError("interrupted; nothing was changed", ExitCode.INTERRUPTED)
    if ended.returncode != 0:
        reason = ended.stderr.decode(errors="replace").strip() or f"it exited with status {ended.returncode}"
        raise LocalError(f"the run cannot be compared: {reason}", ExitCode.FAILED)
    return dict(json.loads(ended.stdout))
