"""history.jsonl: one line per optimizer step, written by rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune_trainer.files import write_durably


def kept_lines(text: str, resumed_step: int) -> list[str]:
    """PURE. The lines up to the resumed step; later ones are written again, and a line cut off by a crash goes."""
    kept = []
    for line in text.splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if step <= resumed_step:
            kept.append(line)
    return kept


class History:
    """Appends lines; losing the last ones in a crash does no harm, because a resumed run writes them again."""

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        """`resumed_step`: None for a run from the start."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(errors="replace") if path.exists() and resumed_step is not None else ""
        kept = kept_lines(before, resumed_step or 0)
        write_durably(path, "".join(f"{line}\n" for line in kept).encode())

    def append(self, **values: Any) -> None:
        """Add one line."""
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")
