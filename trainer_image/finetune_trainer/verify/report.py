"""Defines the results of a verification, and writes them as JSON, as a few lines for logs, and as a page of Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_trainer.markdown import code, table
from finetune_trainer.verify.gate import LogitFigures, VerificationGate, gate_rows
from finetune_trainer.verify.tensors import TensorFigures

MAX_FAULTS_IN_TEXT = 5
MAX_FAULTS_ON_PAGE = 50
_OTHER_BASE = {"Original": "Dequantized", "Dequantized": "Original"}


@dataclass(frozen=True)
class Compared:
    """The compared files: the SHA-256 of each, by file name."""

    base: Mapping[str, str]
    adapters: tuple[Mapping[str, str], ...]
    merged: Mapping[str, str]


@dataclass(frozen=True)
class VerificationReport:
    """Results of a verification.

    passed: whether there is no fault. logits: None if tensors were already wrong. merged_onto: the base to which the adapters
    were added (Original or Dequantized), to which `logits` and `gate` refer. other_logits: for an adapter trained on a quantised
    base, the comparison with the other base + adapter. peak_memory_bytes: peak memory of the whole process.
    """

    passed: bool
    faults: tuple[str, ...]
    tensors: TensorFigures
    logits: LogitFigures | None
    gate: VerificationGate | None
    seconds: float
    merged_onto: str
    other_logits: LogitFigures | None
    compared: Compared
    peak_memory_bytes: int

    def text(self) -> str:
        """Return a few lines for logs and termination messages."""
        tensors = self.tensors
        lines = [
            f"merge verification {'passed' if self.passed else 'FAILED'}",
            (
                f"tensors: {tensors.num_untouched} untouched, {tensors.num_changed} changed, {tensors.num_values_sampled} values "
                f"against fp64, largest error {tensors.worst_rounding:.2f} of what rounding allows"
            ),
        ]
        if self.logits is not None:
            logits = self.logits
            lines.append(
                f"logits: {logits.num_positions} positions, largest difference {logits.max_abs_difference:.3g} of "
                f"{logits.max_abs_logit:.3g}, mean KL {logits.mean_kl:.2g} (the adapter's effect: {logits.effect_mean_kl:.2g}), "
                f"same most likely token {logits.top1_agreement:.2%}"
            )
        lines += [f"fault: {fault}" for fault in self.faults[:MAX_FAULTS_IN_TEXT]]
        if len(self.faults) > MAX_FAULTS_IN_TEXT:
            lines.append(f"and {len(self.faults) - MAX_FAULTS_IN_TEXT} more faults in the full report")
        return "\n".join(lines)

    def json(self) -> str:
        """Return all results as JSON, without tensor classes that the model lacks."""
        tensors: dict[str, Any] = dataclasses.asdict(self.tensors)
        tensors |= {name: getattr(self.tensors, name) for name in ("num_untouched", "num_changed", "num_by_logits_only")}
        tensors |= {name: getattr(self.tensors, name) for name in ("num_values_sampled", "worst_rounding")}
        tensors["classes"] = {
            name: {**tensors["classes"][name], "relative_change": figures.relative_change}
            for name, figures in self.tensors.classes.items()
            if figures.num_untouched or figures.num_changed
        }
        return json.dumps({**dataclasses.asdict(self), "tensors": tensors}, indent=2) + "\n"


def verification_page(report: VerificationReport) -> str:
    """Return the report as a page of Markdown."""
    tensors, logits, gate, other = report.tensors, report.logits, report.gate, report.other_logits
    compared = (
        f"{tensors.num_changed + tensors.num_untouched:,} tensors were compared with base and adapter: {tensors.num_untouched:,} "
        f"untouched ones byte for byte, and {tensors.num_changed:,} changed ones against a computation in fp64."
    )
    of_logits = (
        "Logits were not compared, because tensors were wrong already."
        if logits is None
        else f"Logits were compared at {logits.num_positions:,} positions of {logits.num_prompts:,} prompts. It took "
        f"{report.seconds:,.0f} s and {report.peak_memory_bytes / 2**30:.1f} GiB of memory at most."
    )
    lines = [f"# Verification of the merge: {'passed' if report.passed else 'FAILED'}", "", f"{compared} {of_logits}"]
    if report.faults:
        lines += ["", "## What is wrong", "", *(f"* {fault}" for fault in report.faults[:MAX_FAULTS_ON_PAGE])]
    if len(report.faults) > MAX_FAULTS_ON_PAGE:
        lines.append(f"* and {len(report.faults) - MAX_FAULTS_ON_PAGE:,} more in the JSON report")
    if logits is not None and gate is not None:
        lines += ["", "## Logits: merged model against base + adapter", ""]
        lines += table(("figure", "measured", "allowed"), gate_rows(logits, gate))
        lines += ["", f"The adapter was added to this base: {report.merged_onto}."]
    if other is not None and gate is not None:
        lines += [
            "",
            f"## Against the other base: {_OTHER_BASE[report.merged_onto]}",
            "",
            (
                "The adapter was trained on a quantised base. These are the same figures against base + adapter with the base "
                "that the merge did not use. They show what the choice of the base changes, and no threshold applies to them."
            ),
            "",
            # The largest difference and the share of the effect are left out, because only a gate needs them.
            *table(("figure", "measured"), [gate_rows(other, gate)[number][:2] for number in (0, 2, 3, 4)]),
        ]
    lines += ["", "## Tensors", "", *_tensor_table(tensors)]
    if tensors.num_by_logits_only:
        lines += [
            "",
            (
                f"{tensors.num_by_logits_only:,} changed tensors can be merged by PEFT's own layers only, so there is no "
                "independent formula to compare with: only the comparison of logits covers them."
            ),
        ]
    adapters = report.compared.adapters
    groups = [("base", report.compared.base)]
    groups += [(f"adapter {number}" if len(adapters) > 1 else "adapter", files) for number, files in enumerate(adapters, start=1)]
    groups.append(("merged", report.compared.merged))
    rows = [(role, code(name), code(sha256)) for role, files in groups for name, sha256 in files.items()]
    lines += ["", "## What was compared, SHA-256", "", *table(("role", "file", "digest"), rows)]
    return "\n".join(lines) + "\n"


def _tensor_table(tensors: TensorFigures) -> list[str]:
    header = ("class", "untouched", "changed", "values against fp64", "largest error, of what rounding allows", "relative change")
    rows = [
        (
            name,
            f"{figures.num_untouched:,}",
            f"{figures.num_changed:,}",
            f"{figures.num_values_sampled:,}",
            f"{figures.worst_rounding:.2f}" if figures.num_values_sampled else "",
            f"{figures.relative_change:.2e}" if figures.num_values_sampled else "",
        )
        for name, figures in tensors.classes.items()
        if figures.num_untouched or figures.num_changed
    ]
    return table(header, rows)
