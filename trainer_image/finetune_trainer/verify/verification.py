"""Runs a whole verification: compares tensors and logits, applies the gate, writes the report, and renames the model.

A model that passes gets its final name; one that fails is quarantined. Called by the merge role and the command line.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from finetune_trainer.verify.tensors import check_tensors, manifest_faults
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
) -> VerificationReport:
    """Compare tensors and, if they are right, logits. Write the report and, to `page_path`, a human-readable page.

    adapters: in the order in which they were merged. prompts: held-out token ids, or prompts.default_prompts. gate: see
    gate_of_merge. quantization: how the base was quantized when the adapters were trained, if it was; then logits are compared
    with both bases, and the gate applies to `merged_onto`. base_sha256: digests of the base's files that preflight recorded, by
    name; None: unknown. allow_remote_code: whether the base's own code may run. digests: digests of files, whose computation may
    still be running. device: device on which logits are computed.

    Raises MergeError if a directory cannot be read or the model cannot be verified, and ValueError for empty prompts, or for
    Dequantized without `quantization`.
    """
    started = time.monotonic()
    onto_dequantized = merged_onto is MergeBase.DEQUANTIZED
    if onto_dequantized and quantization is None:
        raise ValueError("merged_onto is Dequantized, but no quantization is given: nothing was packed in training.")
    digests = digests or FileDigests()
    digests.begin(directory / name for directory in (merged, base) for name in read_checkpoint(directory).file_bytes)
    digests.begin(adapter / ADAPTER_FILE for adapter in adapters)
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
        if gate.max_excused and logits.top1_agreement < gate.min_top1_agreement:
            # Rounding alone may change the most likely token more often, if the likely tokens have nearly equal logits.
            (own, *_) = compare_logits(references[:1], merged, prompts, scratch=report_path.parent, is_peft_merge=True)
            gate = replace(gate, min_top1_agreement=min(gate.min_top1_agreement, own.top1_agreement))
        faults = gate_failures(logits, gate)
    # The following checks come last, because they wait for the digests.
    compared = _compared(base, adapters, merged, digests)
    of_base = tuple(
        f"base file {name} does not have the sha256 that preflight recorded: it changed after that"
        for name, sha256 in (base_sha256 or {}).items()
        if compared.base.get(name) != sha256
    )
    faults = (*of_base, *manifest_faults(merged, digests), *faults)
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
    paths: MergedPaths, verify: Callable[..., VerificationReport], withdraw: Callable[[VerificationReport], None]
) -> VerificationReport:
    """Verify the model at `paths.current`, and move it to `paths.verified` if it passes.

    verify: `verify_merge` with all arguments except the paths. withdraw: called if the model fails, after its reports are written
    and before it is renamed; it must remove everything elsewhere that presents the model as a result. Raises VerificationError if
    the model fails; it is then kept as `paths.quarantined`. Also raises what `verify_merge` raises.
    """
    merged = paths.current
    report = verify(merged=merged, report_path=paths.report, page_path=paths.page)
    log.info("%s", report.text())
    if not report.passed:
        withdraw(report)
        kept, number = paths.quarantined, 1
        while kept.exists():  # earlier quarantined models are kept
            number += 1
            kept = paths.quarantined.with_name(f"{paths.quarantined.name}-{number}")
        merged.rename(kept)
        raise VerificationError(
            f"{report.text()}\nthe merged model is kept as {kept.name}",
            f"see {paths.page.name} in the same directory; the adapter itself is whole",
        )
    if merged != paths.verified:
        publish_directory(merged, paths.verified)
    return report


def gate_of_merge(base: Path, merged: str | None) -> VerificationGate:
    """Return the gate for a merge into the model in `base`. merged: the requested element type; None: the base's own.

    Raises ValueError for an element type without a gate, and ModelError for a base that is not a model.
    """
    return GATES[judged_dtype(base, merged)]


def judged_dtype(base: Path, merged: str | None) -> str:
    """Return the element type of the gate that `gate_of_merge` returns. Raises what that function raises."""
    stored = dtype_name(stored_dtype(base))
    config = read_json(base / CONFIG_FILE)
    named = config.get("dtype") or config.get("torch_dtype")
    return coarsest_dtype(stored, *([named] if named in GATES else []), *([merged] if merged else []))


def _references(
    base: Path, adapters: Sequence[Path], quantization: Quantization | None, *, onto_dequantized: bool
) -> list[Reference]:
    """Return the references for the comparison; the gate applies to the first one."""
    original = Reference(base, adapters)
    if quantization is None:
        return [original]
    # This imports bitsandbytes, so it happens only if it is needed.
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
