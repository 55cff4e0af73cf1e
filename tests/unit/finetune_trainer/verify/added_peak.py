"""How much memory a comparison of logits takes in addition to what its process held before."""

from __future__ import annotations

import resource
from pathlib import Path

from finetune_trainer.verify.logits import Reference, compare_logits

PROMPTS = [[1, 5, 9, 70000] * 5, [3, 4, 131071]]


def write_added_peak(base: Path, adapter: Path, answer: Path) -> None:
    """Compare, and write the bytes; for a process of its own, whose peak nothing else has raised."""
    before = _peak_bytes()
    compare_logits([Reference(base, [adapter])], base, PROMPTS, base.parent)
    answer.write_text(str(_peak_bytes() - before))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
