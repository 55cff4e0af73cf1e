"""How much memory a comparison of logits takes in addition to what its process held before; a program, which prints the bytes.

A fork would begin with the pages and the peak of the process that it is a fork of.
"""

from __future__ import annotations

import sys
from pathlib import Path

from finetune_trainer.verify import streaming
from finetune_trainer.verify.logits import Reference, compare_logits

PROMPTS = [[1, 5, 9, 70000] * 5, [3, 4, 131071]]


def added_peak(base: Path, adapter: Path, small_base: Path, small_adapter: Path) -> int:
    """Compare layer by layer. small_base: a model with which libraries allocate what they allocate once."""
    streaming.MAX_WHOLE_BYTES = 0
    compare_logits([Reference(small_base, [small_adapter])], small_base, [[1, 5, 9]], base.parent)
    before = _bytes_of("VmRSS")
    compare_logits([Reference(base, [adapter])], base, PROMPTS, base.parent)
    return _bytes_of("VmHWM") - before


def _bytes_of(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    print(added_peak(*map(Path, sys.argv[1:])))
