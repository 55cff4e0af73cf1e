"""A verification from start to end: tensors, logits, the gate, the report. What follows from its verdict: naming.py."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from finetune_job.api.output import MergeBase
from finetune_trainer.files import MANIFEST_FILE, file_sha256, write_durably
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.verify.gate import Gate, LogitFigures, failures
from finetune_trainer.verify.logits import Reference, compare_logits
from finetune_trainer.verify.page import verification_page
from finetune_trainer.verify.report import Compared, VerificationReport
from finetune_trainer.verify.tensors import check_tensors
from finetune_trainer.weights.errors import UnsupportedBaseError
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CONFIG_FILE, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model


def verify_merge(
    *,
    base: Path,
    adapters: Sequence[Path],
    merged: Path,
    prompts: Sequence[Sequence[int]],
    gate: Gate,
    report_path: Path,
    page_path: Path | None = None,
    quantization: Quantization | None = None,
    merged_onto: MergeBase = MergeBase.ORIGINAL,
    base_sha256: Mapping[str, str] | None = None,
    allow_remote_code: bool = False,
) -> VerificationReport:
    """Checks tensors, then logits if the tensors are right, and writes the report, and a page for people where `page_path` says.

    adapters: in the order in which they were merged. prompts: held-out token ids, or prompts.default_prompts. gate: see
    element_types.gate_of. quantization: how the training that made the adapters packed the base, if it did; then the logits are
    compared with both bases, and the gate is about `merged_onto`. base_sha256: of files of the base, by name, when the training
    began; None: not known. allow_remote_code: whether the base's own code may run.
    Raises MergeError when a directory cannot be read or the model cannot be verified, ValueError for empty prompts or Dequantized
    without `quantization`.
    """
    started = time.monotonic()
    onto_dequantized = merged_onto is MergeBase.DEQUANTIZED
    if onto_dequantized and quantization is None:
        raise ValueError("merged_onto is Dequantized, but no quantization is given: nothing was packed in training.")
    tensors = check_tensors(base, adapters, merged, quantization if onto_dequantized else None)
    compared = _compared(base, adapters, merged)
    faults = (*_faults_of_base(compared.base, base_sha256 or {}), *tensors.faults)
    logits: LogitFigures | None = None
    other: LogitFigures | None = None
    if not faults:
        references = [
            replace(reference, allow_remote_code=allow_remote_code)
            for reference in _references(base, adapters, quantization, onto_dequantized=onto_dequantized)
        ]
        logits, *others = compare_logits(references, merged, prompts, scratch=report_path.parent)
        other = others[0] if others else None
        faults = failures(logits, gate)
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


def _references(
    base: Path, adapters: Sequence[Path], quantization: Quantization | None, *, onto_dequantized: bool
) -> list[Reference]:
    """The one that the gate is about first."""
    original = Reference(base, adapters)
    if quantization is None:
        return [original]
    # Imports bitsandbytes: only where it is needed.
    from finetune_trainer.merge.quantized_base import quantized_tensors

    stored = read_stored_model(read_checkpoint(base), read_json(base / CONFIG_FILE))
    try:
        packed = Reference(base, adapters, quantized_tensors(base, stored, quantization))
    except UnsupportedBaseError:
        if onto_dequantized:
            raise
        # The base that was packed is compared besides: where that is not known, the gate decides without it.
        return [original]
    return [packed, original] if onto_dequantized else [original, packed]


def _compared(base: Path, adapters: Sequence[Path], merged: Path) -> Compared:
    return Compared(
        base=_digests(base, (CONFIG_FILE, *read_checkpoint(base).file_bytes)),
        adapters=tuple(_digests(adapter, (ADAPTER_CONFIG_FILE, ADAPTER_FILE)) for adapter in adapters),
        merged=_digests(merged, (MANIFEST_FILE,) if (merged / MANIFEST_FILE).exists() else read_checkpoint(merged).file_bytes),
    )


def _faults_of_base(found: Mapping[str, str], known: Mapping[str, str]) -> Iterator[str]:
    """Where the base is not what was trained on any more."""
    for name, sha256 in known.items():
        if found.get(name) != sha256:
            yield f"base file {name} does not have the sha256 that preflight recorded: it changed after that"


def _digests(directory: Path, names: Sequence[str] | Mapping[str, int]) -> dict[str, str]:
    return {name: file_sha256(directory / name) for name in names}
