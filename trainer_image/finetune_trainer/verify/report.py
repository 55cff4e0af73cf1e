"""Results of a verification: as data, as JSON beside the model, as a few lines for logs, and as a page in Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_trainer.markdown import code, table
from finetune_trainer.verify.gate import LogitFigures, VerificationGate
from finetune_trainer.verify.tensors import TensorFigures

MAX_FAULTS_IN_TEXT = 5
MAX_FAULTS_ON_PAGE = 50
_OTHER_BASE = {"Original": "Dequantized", "Dequantized": "Original"}


@dataclass(frozen=True)
class Compared:
    """The compared files: sha256 by file name."""

    base: Mapping[str, str]
    adapters: tuple[Mapping[str, str], ...]
    merged: Mapping[str, str]


@dataclass(frozen=True)
class VerificationReport:
    """Results of a verification.

    passed: no fault in tensors or logits. logits: None if tensors were already wrong. merged_onto: the base that the adapters
    were added to, which `logits` and `gate` are about: Original or Dequantized. other_logits: for an adapter of a quantised
    training, the figures against base + adapter with the other base. peak_memory_bytes: of the whole process.
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
        """A few lines for logs and termination messages."""
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
        """Everything as JSON, without tensor classes that the model lacks."""
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
    """The report as a page in Markdown."""
    lines = [
        f"# Verification of the merge: {'passed' if report.passed else 'FAILED'}",
        "",
        _summary(report),
        *_faults(report),
        *_gate(report),
        *_other(report),
        *_tensors(report),
        *_compared(report),
    ]
    return "\n".join(lines) + "\n"


def _summary(report: VerificationReport) -> str:
    tensors = report.tensors
    done = (
        f"{tensors.num_changed + tensors.num_untouched:,} tensors were compared with base and adapter: {tensors.num_untouched:,} "
        f"that the adapter does not touch byte for byte, {tensors.num_changed:,} that it changes against a computation in fp64."
    )
    if report.logits is None:
        return f"{done} Logits were not compared, because tensors were wrong already."
    return (
        f"{done} Logits were compared at {report.logits.num_positions:,} positions of {report.logits.num_prompts:,} prompts. It "
        f"took {report.seconds:,.0f} s and {report.peak_memory_bytes / 2**30:.1f} GiB of memory at most."
    )


def _faults(report: VerificationReport) -> Iterator[str]:
    if not report.faults:
        return
    yield from ("", "## What is wrong", "")
    yield from (f"* {fault}" for fault in report.faults[:MAX_FAULTS_ON_PAGE])
    if len(report.faults) > MAX_FAULTS_ON_PAGE:
        yield f"* and {len(report.faults) - MAX_FAULTS_ON_PAGE:,} more in the JSON report"


def _gate(report: VerificationReport) -> Iterator[str]:
    if report.logits is None or report.gate is None:
        return
    yield from ("", "## Logits: merged model against base + adapter", "")
    yield from table(("figure", "measured", "allowed"), _gate_rows(report.logits, report.gate))
    yield from ("", f"The base that the adapter was added to: {report.merged_onto}.")


def _gate_rows(logits: LogitFigures, gate: VerificationGate) -> list[Sequence[str]]:
    share = f"{logits.mean_kl / logits.effect_mean_kl:.2%}" if logits.effect_mean_kl else "no effect"
    return [
        (
            f"{logits.judged}, of the largest logit",
            f"{logits.relative_difference:.3g}",
            f"at most {gate.allowed_difference(logits):.3g}",
        ),
        ("largest difference", f"{logits.max_abs_difference:.4g}", f"largest logit {logits.max_abs_logit:.4g}"),
        (f"mean KL divergence of {logits.judged_positions}, nats", f"{logits.mean_kl:.3g}", f"at most {gate.max_mean_kl:.3g}"),
        ("same most likely token", f"{logits.top1_agreement:.3%}", f"at least {gate.min_top1_agreement:.2%}"),
        ("KL divergence of the base, nats (the adapter's effect)", f"{logits.effect_mean_kl:.3g}", ""),
        (
            "mean KL divergence, of the adapter's effect",
            share,
            f"at most {gate.max_kl_share_of_effect:.0%} if the effect exceeds {gate.max_mean_kl:.3g}",
        ),
    ]


def _other(report: VerificationReport) -> Iterator[str]:
    if report.other_logits is None:
        return
    other = report.other_logits
    yield from ("", f"## Against the other base: {_OTHER_BASE[report.merged_onto]}", "")
    yield (
        "The adapter was trained on a quantised base. These are the same figures against base + adapter with the base that the "
        "merge did not use. They show what the choice of the base changes, and no threshold applies to them."
    )
    yield ""
    rows = [
        (f"{other.judged}, of the largest logit", f"{other.relative_difference:.3g}"),
        (f"mean KL divergence of {other.judged_positions}, nats", f"{other.mean_kl:.3g}"),
        ("same most likely token", f"{other.top1_agreement:.3%}"),
        ("KL divergence of the base, nats (the adapter's effect)", f"{other.effect_mean_kl:.3g}"),
    ]
    yield from table(("figure", "measured"), rows)


def _tensors(report: VerificationReport) -> Iterator[str]:
    yield from ("", "## Tensors", "")
    rows = [
        (
            name,
            f"{figures.num_untouched:,}",
            f"{figures.num_changed:,}",
            f"{figures.num_values_sampled:,}",
            f"{figures.worst_rounding:.2f}" if figures.num_values_sampled else "",
            f"{figures.relative_change:.2e}" if figures.num_values_sampled else "",
        )
        for name, figures in report.tensors.classes.items()
        if figures.num_untouched or figures.num_changed
    ]
    header = ("class", "untouched", "changed", "values against fp64", "largest error, of what rounding allows", "relative change")
    yield from table(header, rows)
    if report.tensors.num_by_logits_only:
        yield ""
        yield (
            f"{report.tensors.num_by_logits_only:,} changed tensors can be merged by PEFT's own layers only, so no formula "
            "outside of them was there to compare with: for these the comparison of logits decides alone."
        )


def _compared(report: VerificationReport) -> Iterator[str]:
    yield from ("", "## What was compared, SHA-256", "")
    numbered = len(report.compared.adapters) > 1
    groups: list[tuple[str, Mapping[str, str]]] = [("base", report.compared.base)]
    groups += [
        (f"adapter {number}" if numbered else "adapter", files) for number, files in enumerate(report.compared.adapters, start=1)
    ]
    groups.append(("merged", report.compared.merged))
    rows = [(role, code(name), code(sha256)) for role, files in groups for name, sha256 in files.items()]
    yield from table(("role", "file", "digest"), rows)
