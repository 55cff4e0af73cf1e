"""What a verification found: as data, as JSON beside the model, and as a few lines for logs. The page for people: page.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_trainer.verify.gate import Gate, LogitFigures
from finetune_trainer.verify.tensors import TensorFigures

MAX_FAULTS_IN_TEXT = 5


@dataclass(frozen=True)
class Compared:
    """Which files were compared: sha256 by file name."""

    base: Mapping[str, str]
    adapters: tuple[Mapping[str, str], ...]
    merged: Mapping[str, str]


@dataclass(frozen=True)
class VerificationReport:
    """passed: no fault in tensors or logits. logits is None when tensors were wrong already.

    merged_onto: the base that the adapters were added to, which `logits` and `gate` are about: Original or Dequantized.
    other_logits: for an adapter of a quantised training, the figures against base + adapter with the other base.
    peak_memory_bytes: of the whole process.
    """

    passed: bool
    faults: tuple[str, ...]
    tensors: TensorFigures
    logits: LogitFigures | None
    gate: Gate | None
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
        """Everything; of classes only those that the model has."""
        tensors: dict[str, Any] = dataclasses.asdict(self.tensors)
        tensors |= {name: getattr(self.tensors, name) for name in ("num_untouched", "num_changed", "num_by_logits_only")}
        tensors |= {name: getattr(self.tensors, name) for name in ("num_values_sampled", "worst_rounding")}
        tensors["classes"] = {
            name: {**tensors["classes"][name], "relative_change": figures.relative_change}
            for name, figures in self.tensors.classes.items()
            if figures.num_untouched or figures.num_changed
        }
        return json.dumps({**dataclasses.asdict(self), "tensors": tensors}, indent=2) + "\n"
