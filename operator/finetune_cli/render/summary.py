"""The last words of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.summary import Summary

_HEADS = {
    ExitCode.DONE: "Done.",
    ExitCode.REFUSED: "Refused: nothing was trained.",
    ExitCode.FAILED: "Failed.",
    ExitCode.INTERRUPTED: "Interrupted. Run the same command again to continue.",
}


def summary_text(code: ExitCode, summary: Summary) -> str:
    """Losses, results, verification and time."""
    rows: list[tuple[str, str]] = []
    if summary.losses is not None:
        kind = "held-out loss" if summary.losses.held_out else "training loss"
        rows.append((kind, f"{summary.losses.first:.4f} before, {summary.losses.last:.4f} after"))
    if code is not ExitCode.DONE and summary.step:
        rows.append(("last step", str(summary.step)))
    if code is ExitCode.DONE:
        if summary.address is not None:
            rows.append(("published at", summary.address))
        for label, path in (("adapter", summary.adapter), ("merged model", summary.merged)):
            if path is not None:
                rows.append((label, str(path)))
        rows += verification_rows(summary.figures)
        if summary.verification is not None:
            rows.append(("report", str(summary.verification)))
    rows.append(("workspace", str(summary.workspace)))
    if summary.restarts:
        rows.append(("restarts", str(summary.restarts)))
    rows.append(("time", f"{summary.seconds:.1f} s"))
    return "\n".join(["", _HEADS[code], *row_lines(rows), ""])


def row_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Labels and what they stand for, in two columns."""
    return [f"  {label + ':':<15}{text}" for label, text in rows]


def verification_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures that say most; the report has them all."""
    if "passed" not in figures:
        return []
    parts = ["passed" if figures["passed"] else "FAILED"]
    tensors, logits = figures.get("tensors") or {}, figures.get("logits") or {}
    if "num_changed" in tensors:
        parts.append(f"{tensors['num_changed']} tensors changed, {tensors.get('num_untouched', 0)} untouched")
    if "mean_kl" in logits:
        parts.append(f"mean KL {logits['mean_kl']:.2g}")
    if "top1_agreement" in logits:
        parts.append(f"same token {logits['top1_agreement']:.1%}")
    rows = [("verification", ", ".join(parts))]
    other = figures.get("other_logits")
    if isinstance(other, Mapping) and "mean_kl" in other:
        # QLoRA: the adapter was trained on other values of the base than those that it was added to, or the other way round.
        rows.append(("on other base", f"mean KL {other['mean_kl']:.2g}, same token {other.get('top1_agreement', 0):.1%}"))
    return rows
