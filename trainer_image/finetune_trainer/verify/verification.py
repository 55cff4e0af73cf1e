"""A verification from start to end: the gate of a merge, tensors, logits, the report, and the name that the model takes.

A model that passes takes its final name, one that fails is quarantined. Called by the merge role and the command line.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from finetune_job.api.enumerations import MergeBase
from finetune_job.layout import MergedPaths
from finetune_trainer.errors import VerificationError
from finetune_trainer.files import MANIFEST_FILE, FileDigests, publish_directory, write_durably
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.model.load import stored_dtype
from finetune_trainer.verify.gate import GATES, LogitFigures, VerificationGate, coarsest_dtype, gate_failures
from finetune_trainer.verify.logits import Reference, compare_logits
from finetune_trainer.verify.report import Compared, VerificationReport, verification_page
from finetune_trainer.verify.tensors import TensorFigures, check_tensors, manifest_faults
from finetune_trainer.weights.errors import UnsupportedBaseError
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CONFIG_FILE, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model
from finetune_trainer.weights.rounding import dtype_name

log = logging.getLogger(__name__)


def verify_merge(
    *,
    base: Path,
    adapters: Sequence[Path],
    merged: Path,
    prompts: Sequence[Sequence[int]],
    gate: VerificationGate,
    report_path: Path,
    page_path: Path | None = None,
    quantization: Quantization | None = None,
    merged_onto: MergeBase = MergeBase.ORIGINAL,
    base_sha256: Mapping[str, str] | None = None,
    allow_remote_code: bool = False,
    digests: FileDigests | None = None,
    device: str = "cpu",
    tensors: TensorFigures | None = None,
    started: float | None = None,
) -> VerificationReport:
    """Checks tensors, then logits if the tensors are right, and writes the report, and a page for people where `page_path` says.

    adapters: in the order in which they were merged. prompts: held-out token ids, or prompts.default_prompts. gate: see
    gate_of_merge. quantization: how the training that made the adapters packed the base, if it did; then the logits are
    compared with both bases, and the gate is about `merged_onto`. base_sha256: of files of the base, by name, when the training
    began; None: not known. allow_remote_code: whether the base's own code may run. digests: of files whose hashing has begun.
    device: where logits are computed. tensors: what `check_tensors` has found already. started: when that began, by
    `time.monotonic()`.
    Raises MergeError when a directory cannot be read or the model cannot be verified, ValueError for empty prompts or Dequantized
    without `quantization`.
    """
    started = time.monotonic() if started is None else started
    onto_dequantized = merged_onto is MergeBase.DEQUANTIZED
    if onto_dequantized and quantization is None:
        raise ValueError("merged_onto is Dequantized, but no quantization is given: nothing was packed in training.")
    digests = digests or FileDigests()
    digests.begin(directory / name for directory in (merged, base) for name in read_checkpoint(directory).file_bytes)
    digests.begin(adapter / ADAPTER_FILE for adapter in adapters)
    if tensors is None:
        tensors = check_tensors(base, adapters, merged, quantization if onto_dequantized else None)
    faults: tuple[str, ...] = tuple(tensors.faults)
    logits: LogitFigures | None = None
    other: LogitFigures | None = None
    if not faults:
        references = [
            replace(reference, allow_remote_code=allow_remote_code, device=torch.device(device))
            for reference in _references(base, adapters, quantization, onto_dequantized=onto_dequantized)
        ]
        logits, *others = compare_logits(references, merged, prompts, scratch=report_path.parent)
        other = others[0] if others else None
        faults = gate_failures(logits, gate)
    # Last, because these wait for the digests.
    compared = _compared(base, adapters, merged, digests)
    faults = (*_faults_of_base(compared.base, base_sha256 or {}), *manifest_faults(merged, digests), *faults)
    report = VerificationReport(
        passed=not faults,
        faults=faults,
        tensors=tensors,
        logits=logits,
        gate=gate,
        seconds=time.monotonic() - started,
        merged_onto=merged_onto.value,
        other_logits=other,
        compared=compared,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    write_durably(report_path, report.json().encode())
    if page_path is not None:
        write_durably(page_path, verification_page(report).encode())
    return report


def verify_and_name(
    paths: MergedPaths,
    *,
    base: Path,
    adapters: Sequence[Path],
    prompts: Sequence[Sequence[int]],
    gate: VerificationGate,
    quantization: Quantization | None,
    merged_onto: MergeBase,
    base_sha256: Mapping[str, str] | None,
    allow_remote_code: bool,
    withdraw: Callable[[VerificationReport], None],
    digests: FileDigests | None = None,
    device: str = "cpu",
    tensors: TensorFigures | None = None,
    started: float | None = None,
) -> VerificationReport:
    """Verify the model at `paths.current`; it then is at `paths.verified`. All other arguments but one: as of `verify_merge`.

    withdraw: called if the model fails, after its reports are written and before it loses its name. What says elsewhere that the
    model is a result has to stop saying so then.
    Raises VerificationError for a model that fails, which is then kept as `paths.quarantined`, and as `verify_merge` does.
    """
    merged = paths.current
    report = verify_merge(
        base=base,
        adapters=adapters,
        merged=merged,
        prompts=prompts,
        gate=gate,
        report_path=paths.report,
        page_path=paths.page,
        quantization=quantization,
        merged_onto=merged_onto,
        base_sha256=base_sha256,
        allow_remote_code=allow_remote_code,
        digests=digests,
        device=device,
        tensors=tensors,
        started=started,
    )
    log.info("%s", report.text())
    if not report.passed:
        withdraw(report)
        kept = quarantine(merged, paths.quarantined)
        raise VerificationError(
            f"{report.text()}\nthe merged model is kept as {kept.name}",
            f"see {paths.page.name} in the same directory; the adapter itself is whole",
        )
    if merged != paths.verified:
        publish_directory(merged, paths.verified)
    return report


def quarantine(path: Path, kept: Path) -> Path:
    """Rename a failed model to `kept`, numbered if that exists already, and return the new path. Nothing is deleted."""
    target, number = kept, 1
    while target.exists():
        number += 1
        target = kept.with_name(f"{kept.name}-{number}")
    return path.rename(target)


def gate_of_merge(base: Path, merged: str | None) -> VerificationGate:
    """The gate of a merge into the model in `base`; merged: the element type that was asked for, None: the base's own.

    Raises ValueError for another one than the gates are known for, ModelError for a base that is not a model.
    """
    return GATES[judged_dtype(base, merged)]


def judged_dtype(base: Path, merged: str | None) -> str:
    """The element type that this gate is of. Raises as `gate_of_merge` does."""
    stored = dtype_name(stored_dtype(base))
    config = read_json(base / CONFIG_FILE)
    named = config.get("dtype") or config.get("torch_dtype")
    return coarsest_dtype(stored, *([named] if named in GATES else []), *([merged] if merged else []))


def _references(
    base: Path, adapters: Sequence[Path], quantization: Quantization | None, *, onto_dequantized: bool
) -> list[Reference]:
    """The one that the gate is about first."""
    original = Reference(base, adapters)
    if quantization is None:
        return [original]
    # Imports bitsandbytes: only if it is needed.
    from finetune_trainer.merge.quantized_base import quantized_tensors

    stored = read_stored_model(read_checkpoint(base), read_json(base / CONFIG_FILE))
    try:
        packed = Reference(base, adapters, quantized_tensors(base, stored, quantization))
    except UnsupportedBaseError:
        if onto_dequantized:
            raise
        # The base that was packed is compared as well: if that is not known, the gate decides without it.
        return [original]
    return [packed, original] if onto_dequantized else [original, packed]


def _compared(base: Path, adapters: Sequence[Path], merged: Path, digests: FileDigests) -> Compared:
    def found(directory: Path, names: Iterable[str]) -> dict[str, str]:
        return {name: digests.of(directory / name) for name in names}

    return Compared(
        base=found(base, (CONFIG_FILE, *read_checkpoint(base).file_bytes)),
        adapters=tuple(found(adapter, (ADAPTER_CONFIG_FILE, ADAPTER_FILE)) for adapter in adapters),
        merged=found(merged, (MANIFEST_FILE,) if (merged / MANIFEST_FILE).exists() else read_checkpoint(merged).file_bytes),
    )


def _faults_of_base(found: Mapping[str, str], known: Mapping[str, str]) -> Iterator[str]:
    """Files of the base that are not what was trained on any more."""
    for name, sha256 in known.items():
        if found.get(name) != sha256:
            yield f"base file {name} does not have the sha256 that preflight recorded: it changed after that"
