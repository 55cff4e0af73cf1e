"""What a verification found, as JSON beside the model and as text for people. Written by run.py, read by publish."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.verify.gate import Gate, LogitFigures
from finetune_trainer.verify.tensors import TensorFigures

MAX_FAULTS_IN_TEXT = 5


@dataclass(frozen=True)
class VerificationReport:
    """passed: no fault in tensors or logits. logits is None when tensors were wrong already or no prompts were given."""

    passed: bool
    faults: tuple[str, ...]
    tensors: TensorFigures
    logits: LogitFigures | None
    gate: Gate | None
    seconds: float

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

    def write(self, path: Path) -> None:
        """Writes JSON so that a reader sees the old file or the new one."""
        temporary = path.with_name(f"{path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
