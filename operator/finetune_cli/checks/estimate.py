"""`finetune estimate`: a job and its model's configuration in, the memory of a rank and the time of a step out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from finetune_cli.checks.calibration import OPTION, MeasuredDevice
from finetune_cli.checks.validate import DocumentOutcome, DocumentVerdict, validate
from finetune_cli.exit_codes import ExitCode
from finetune_job.api.base import ClaimPath, parse_source
from finetune_job.api.pod_settings import quantity_bytes
from finetune_job.device import device_text, product_of
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import PRECISION_FIELD, RunPlan
from finetune_memory.describe import model_shape, read_model
from finetune_memory.devices import ASSUMED, Calibration, device_of
from finetune_memory.limit import MemoryLimit, format_bytes
from finetune_memory.model_shape import UnknownModelError
from finetune_memory.pace import StepTime, UnknownPaceError, calculated_pace, run_steps
from finetune_memory.verdict import MemoryVerdict, judge_memory, limit_of

GPU_MEMORY_OPTION = "--gpu-memory"
SMALLEST_DEVICE = 2**20
"""Bytes; of less, the unit has been forgotten."""


class EstimateError(Exception):
    """Nothing can be estimated; the text says what is missing."""

    exit_code = ExitCode.UNUSABLE


class RefusedError(EstimateError):
    """A rule speaks against the job."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class JobEstimate:
    """The estimate of one job."""

    name: str
    plan: RunPlan
    verdict: MemoryVerdict
    place: str
    """Ranks and their devices, in words."""
    precision: str
    """Element type of matrix products, and why it is that one."""
    pace: StepTime | None
    """Time of an optimizer step."""
    pace_problem: str
    """Why it is not known."""
    run_seconds: float | None
    """Seconds of all steps; None if their number is not known."""
    price_per_hour: float | None
    """Price of one device."""

    @property
    def device_hours(self) -> float | None:
        """Hours of all ranks together."""
        return None if self.run_seconds is None else self.run_seconds / 3600 * self.plan.parallelism.world_size

    @property
    def cost(self) -> float | None:
        """Cost of the whole run, in the currency of the price."""
        hours, price = self.device_hours, self.price_per_hour
        return None if hours is None or price is None else hours * price


@dataclass(frozen=True)
class EstimateOptions:
    """Options besides the manifest; None: what profile and plan say."""

    model: Path | None = None
    """Directory of the base model, or its config.json; None: what `claims` holds under the job's source."""
    gpu_memory: str | None = None
    gpu: str | None = None
    """Name of a device."""
    tokens: int | None = None
    """Tokens of one pass over the data."""
    measured: MeasuredDevice | None = None
    """Which parts of its peaks the device reaches; None: what is assumed of all."""


def estimate(manifest: str, *, profile: str | None, claims: Path, options: EstimateOptions) -> list[JobEstimate]:
    """Memory and time of every job of a manifest. Raises EstimateError."""
    report = validate(manifest, profile)
    jobs = [verdict for verdict in report.verdicts if verdict.job is not None]
    for verdict in report.verdicts:
        if verdict.outcome in (DocumentOutcome.REFUSED, DocumentOutcome.UNUSABLE):
            first = next(finding for finding in verdict.findings if finding.severity == "error")
            kind = RefusedError if verdict.outcome is DocumentOutcome.REFUSED else EstimateError
            raise kind(f"{verdict.name or 'the manifest'}: {first.field}: {first.message}\n  fix: {first.fix}")
    if not jobs:
        raise EstimateError("the manifest holds no FineTuneJob")
    return [_estimate_job(verdict, options, claims) for verdict in jobs]


def _estimate_job(verdict: DocumentVerdict, options: EstimateOptions, claims: Path) -> JobEstimate:
    plan, job = verdict.plan, verdict.job
    if plan is None or job is None:
        raise EstimateError(f"{verdict.name}: has no plan")
    if plan.placement is None and options.gpu is None and options.measured is not None:
        options = replace(options, gpu=options.measured.name)
    if plan.placement is None and (options.gpu, options.gpu_memory) != (None, None):
        # Without a profile it is the command that says on what the job trains.
        plan = resolve(plan.job, job.spec, None, has_gpu=True)
    try:
        files = read_model(options.model if options.model is not None else _model_on_claim(job.spec.model.source, claims))
        limit = _limit(plan, options)
        shape = model_shape(plan, files)
        memory = judge_memory(plan, shape, files.stored, limit)
        pace, problem = None, ""
        try:
            product, calibration = _device(plan, options)
            pace = calculated_pace(memory.plan, shape, files.stored, product, calibration)
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
        raise EstimateError(f"{verdict.name}: {error}") from error


def _device(plan: RunPlan, options: EstimateOptions) -> tuple[str | None, Calibration]:
    """Name of the device, and which parts of its peaks training reaches. Raises EstimateError."""
    named, measured = options.gpu or product_of(plan), options.measured
    if measured is None:
        return named, ASSUMED
    if named is not None and not measured.is_like(named):
        raise EstimateError(f"{OPTION}: was measured on {measured.name}, and the job trains on {named}; measure it there")
    return named or measured.name, measured.calibration


def _limit(plan: RunPlan, options: EstimateOptions) -> MemoryLimit | None:
    """Memory of a device: the option, else the profile, else the memory of a device that is known by its name."""
    if options.gpu_memory is not None:
        return MemoryLimit(_device_bytes(options.gpu_memory), is_device=True, source=GPU_MEMORY_OPTION)
    limit, name = limit_of(plan), options.gpu or product_of(plan)
    device = device_of(name) if name is not None and (limit is None or options.gpu is not None) else None
    return limit if device is None else MemoryLimit(device.capacity, is_device=True, source=f"of one {name}")


def _precision(plan: RunPlan, stored: str) -> str:
    """stored: element type of the base model's files."""
    elements = resolve_elements(plan, stored)
    why = "as the base model is stored"
    if any(choice.field == PRECISION_FIELD for choice in plan.choices):
        why = "chosen, see below"
    elif plan.training.precision is not None:
        why = "spec.training.precision"
    elif plan.model.dtype is not None:
        why = "spec.model.dtype"
    return f"{elements.computed} ({why})" + (", never rounded to TF32" if elements.computed == "float32" else "")


def _device_bytes(written: str) -> int:
    try:
        size = quantity_bytes(written)
    except ValueError as error:
        raise EstimateError(f"{GPU_MEMORY_OPTION}: {error}") from error
    if size < SMALLEST_DEVICE:
        raise EstimateError(
            f"{GPU_MEMORY_OPTION}: {written} is {format_bytes(size)}, and no device is as small; write it as in 80Gi"
        )
    return size


def _model_on_claim(source: str, claims: Path) -> Path:
    place = parse_source(source)
    if not isinstance(place, ClaimPath):
        raise EstimateError(
            f"spec.model.source: {source} is not on this machine; give --model the directory of the model or its config.json"
        )
    directory = claims / place.claim / place.path
    if not directory.exists():
        raise EstimateError(
            f"spec.model.source: {source} is not at {directory}; give --model the directory of the model or its config.json"
        )
    return directory
