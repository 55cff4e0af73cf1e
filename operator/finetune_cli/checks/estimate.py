"""`finetune estimate`: computes the memory of a rank and the time of a step from a job and its model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune_cli.checks.validate import DocumentOutcome, DocumentVerdict, validate
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_job.api.base import ClaimPath, parse_source
from finetune_job.api.pod_settings import quantity_bytes
from finetune_job.device import device_text, product_of
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import PRECISION_FIELD, RunPlan
from finetune_memory.describe import model_shape, read_model
from finetune_memory.devices import device_of, known_devices
from finetune_memory.limit import MemoryLimit, format_bytes
from finetune_memory.model_shape import UnknownModelError
from finetune_memory.pace import StepTime, UnknownPaceError, calculated_pace, run_steps
from finetune_memory.verdict import MemoryVerdict, judge_memory, limit_of

GPU_MEMORY_OPTION = "--gpu-memory"
SMALLEST_DEVICE = 2**20
"""Smallest accepted memory of a device, in bytes: a smaller number probably lacks its unit."""


@dataclass(frozen=True)
class JobEstimate:
    """The estimate of one job."""

    name: str
    plan: RunPlan
    verdict: MemoryVerdict
    place: str
    """A description of the ranks and their devices."""
    precision: str
    """Element type of matrix products, and the reason for it."""
    pace: StepTime | None
    """Time of an optimizer step."""
    pace_problem: str
    """Why the pace is unknown; empty if it is known."""
    run_seconds: float | None
    """Seconds of all steps; None if their pace or number is not known."""
    price_per_hour: float | None
    """Price of one device for an hour."""

    @property
    def device_hours(self) -> float | None:
        """Device hours of the whole run, summed over all ranks."""
        return None if self.run_seconds is None else self.run_seconds / 3600 * self.plan.parallelism.world_size

    @property
    def cost(self) -> float | None:
        """Cost of the whole run, in the currency of the price."""
        hours, price = self.device_hours, self.price_per_hour
        return None if hours is None or price is None else hours * price


@dataclass(frozen=True)
class EstimateOptions:
    """Options that are given beside the manifest; None: not given."""

    model: Path | None = None
    """Directory of the base model, or its config.json; None: the path of the job's source below the directory of claims."""
    gpu_memory: str | None = None
    gpu: str | None = None
    """Name of a device."""
    tokens: int | None = None
    """Tokens of one pass over the data."""


def estimate(manifest: str, *, profile: str | None, claims: Path, options: EstimateOptions) -> list[JobEstimate]:
    """Estimate memory and time of every job of a manifest. Raises LocalError."""
    report = validate(manifest, profile)
    jobs = [verdict for verdict in report.verdicts if verdict.job is not None]
    for verdict in report.verdicts:
        if verdict.outcome in (DocumentOutcome.REFUSED, DocumentOutcome.UNUSABLE):
            first = next(finding for finding in verdict.findings if finding.severity == "error")
            raise LocalError(
                f"{verdict.name or 'the manifest'}: {first.field}: {first.message}\n  fix: {first.fix}",
                ExitCode.REFUSED if verdict.outcome is DocumentOutcome.REFUSED else ExitCode.UNUSABLE,
            )
    if not jobs:
        raise LocalError("the manifest holds no FineTuneJob")
    return [_estimate_job(verdict, options, claims) for verdict in jobs]


def _estimate_job(verdict: DocumentVerdict, options: EstimateOptions, claims: Path) -> JobEstimate:
    plan, job = verdict.plan, verdict.job
    if plan is None or job is None:
        raise LocalError(f"{verdict.name} has no plan")
    if plan.placement is None and (options.gpu, options.gpu_memory) != (None, None):
        # Without a profile, the options say which device the job trains on.
        plan = resolve(plan.job, job.spec, None, has_gpu=True)
    files_at = options.model if options.model is not None else _model_on_claim(job.spec.model.source, claims)
    limit = _limit(plan, options)
    try:
        files = read_model(files_at)
        shape = model_shape(plan, files)
        memory = judge_memory(plan, shape, files.stored, limit)
        pace, problem = None, ""
        try:
            pace = calculated_pace(memory.plan, shape, files.stored, options.gpu or product_of(plan))
        except UnknownPaceError as error:
            problem = str(error)
        steps = run_steps(memory.plan, options.tokens)
        return JobEstimate(
            verdict.name,
            plan,
            memory,
            device_text(plan, options.gpu or (None if options.gpu_memory is None else "GPU")),
            _precision(memory.plan, files.stored),
            pace,
            problem,
            run_seconds=None if pace is None or steps is None else steps * pace.step_seconds,
            price_per_hour=None if verdict.price_per_hour is None else float(verdict.price_per_hour),
        )
    except (UnknownModelError, ValueError) as error:
        raise LocalError(f"{verdict.name}: {error}") from error


def _limit(plan: RunPlan, options: EstimateOptions) -> MemoryLimit | None:
    """Return a device's memory from the first of these that gives it: --gpu-memory, --gpu, the profile, the device's name."""
    if options.gpu_memory is not None:
        try:
            size = quantity_bytes(options.gpu_memory)
        except ValueError as error:
            raise LocalError(f"{GPU_MEMORY_OPTION}: {error}") from error
        if size < SMALLEST_DEVICE:
            given = f"{options.gpu_memory} is {format_bytes(size)}"
            raise LocalError(f"{GPU_MEMORY_OPTION}: {given}, and no device is that small; write it as in 80Gi")
        return MemoryLimit(size, is_device=True, source=GPU_MEMORY_OPTION)
    if options.gpu is not None and device_of(options.gpu) is None:
        raise LocalError(
            f"--gpu {options.gpu}: no such device is known; give {GPU_MEMORY_OPTION}, or one of {', '.join(known_devices())}"
        )
    limit, name = limit_of(plan), options.gpu or product_of(plan)
    device = device_of(name) if name is not None and (limit is None or options.gpu is not None) else None
    return limit if device is None else MemoryLimit(device.capacity, is_device=True, source=f"of one {name}")


def _precision(plan: RunPlan, stored: str) -> str:
    """Name the element type of matrix products, and the reason for it. stored: element type of the base model's files."""
    elements = resolve_elements(plan, stored)
    why = "as the base model is stored"
    if any(choice.field == PRECISION_FIELD for choice in plan.choices):
        why = "chosen, see below"
    elif plan.training.precision is not None:
        why = "spec.training.precision"
    elif plan.model.dtype is not None:
        why = "spec.model.dtype"
    return f"{elements.computed} ({why})" + (", never rounded to TF32" if elements.computed == "float32" else "")


def _model_on_claim(source: str, claims: Path) -> Path:
    place = parse_source(source)
    directory = claims / place.claim / place.path if isinstance(place, ClaimPath) else None
    if directory is None or not directory.exists():
        where = "on this machine" if directory is None else f"at {directory}"
        raise LocalError(
            f"spec.model.source: {source} is not {where}; give --model the directory of the model or its config.json"
        )
    return directory
