"""A verification from start to end: the gate of a merge, tensors, logits, the report, and the model's final name.

A model that passes gets its final name, one that fails is quarantined. Called by the merge role and the command line.
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
    """Check tensors, then logits if the tensors are right; write the report, and a page for people to `page_path`.

    adapters: in the order in which they were merged. prompts: held-out token ids, or prompts.default_prompts. gate: see
    gate_of_merge. quantization: how the adapters' training quantized the base, if it did; then the logits are compared with both
    bases, and the gate is about `merged_onto`. base_sha256: of files of the base, by name, when the training began; None:
    unknown. allow_remote_code: whether the base's own code may run. digests: of files whose hashing has begun. device: on which
    logits are computed. tensors: an existing result of `check_tensors`. started: when that began, by `time.monotonic()`.

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
    """Verify the model at `paths.current`, which then is at `paths.verified`. Most arguments are those of `verify_merge`.

    withdraw: called if the model fails, after its reports are written and before it loses its name. Everything that calls the
    model a result elsewhere must then be removed.
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
    """Rename a failed model to `kept`, numbered if that already exists, and return the new path. Nothing is deleted."""
    target, number = kept, 1
    while target.exists():
        number += 1
        target = kept.with_name(f"{kept.name}-{number}")
    return path.rename(target)


def gate_of_merge(base: Path, merged: str | None) -> VerificationGate:
    """The gate of a merge into the model in `base`. merged: the requested element type; None: the base's own.

    Raises ValueError for an element type without a gate, ModelError for a base that is not a model.
    """
    return GATES[judged_dtype(base, merged)]


def judged_dtype(base: Path, merged: str | None) -> str:
    """The element type of this gate. Raises as `gate_of_merge` does."""
    stored = dtype_name(stored_dtype(base))
    config = read_json(base / CONFIG_FILE)
    named = config.get("dtype") or config.get("torch_dtype")
    return coarsest_dtype(stored, *([named] if named in GATES else []), *([merged] if merged else []))


def _references(
    base: Path, adapters: Sequence[Path], quantization: Quantization | None, *, onto_dequantized: bool
) -> list[Reference]:
    """References for the comparison; the gate is about the first one."""
    original = Reference(base, adapters)
    if quantization is None:
        return [original]
    # Imports bitsandbytes, so only if it is needed.
    from finetune_trainer.merge.quantized_base import quantized_tensors

    stored = read_stored_model(read_checkpoint(base), read_json(base / CONFIG_FILE))
    try:
        packed = Reference(base, adapters, quantized_tensors(base, stored, quantization))
    except UnsupportedBaseError:
        if onto_dequantized:
            raise
        # The quantized base is compared as well; if it cannot be determined, the gate decides without it.
        return [original]
    return [packed, original] if onto_dequantized else [original, packed]


def _compared(base: Path, adapters: Sequence[Path], merged: Path, digests: FileDigests) -> Compared:
    def digests_of(directory: Path, names: Iterable[str]) -> dict[str, str]:
        return {name: digests.of(directory / name) for name in names}

    return Compared(
        base=digests_of(base, (CONFIG_FILE, *read_checkpoint(base).file_bytes)),
        adapters=tuple(digests_of(adapter, (ADAPTER_CONFIG_FILE, ADAPTER_FILE)) for adapter in adapters),
        merged=digests_of(merged, (MANIFEST_FILE,) if (merged / MANIFEST_FILE).exists() else read_checkpoint(merged).file_bytes),
    )


def _faults_of_base(found: Mapping[str, str], known: Mapping[str, str]) -> Iterator[str]:
    """Yield faults of the base's files that have changed since the training."""
    for name, sha256 in known.items():
        if found.get(name) != sha256:
            yield f"base file {name} does not have the sha256 that preflight recorded: it changed after that"
