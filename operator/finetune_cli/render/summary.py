"""The last words of a run."""

from __future__ import annotations

from collections.abc import Mapping
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
        for label, path in (("adapter", summary.adapter), ("merged model", summary.merged)):
            if path is not None:
                rows.append((label, str(path)))
        rows += _verification(summary.figures)
        if summary.verification is not None:
            rows.append(("report", str(summary.verification)))
    rows.append(("workspace", str(summary.workspace)))
    if summary.restarts:
        rows.append(("restarts", str(summary.restarts)))
    rows.append(("time", f"{summary.seconds:.1f} s"))
    return "\n".join(["", _HEADS[code], *(f"  {label + ':':<15}{text}" for label, text in rows), ""])


def _verification(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
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
    return [("verification", ", ".join(parts))]
