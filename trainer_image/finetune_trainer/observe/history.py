"""history.jsonl: one line per optimizer step of the run, whatever attempt did it; written by rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune_trainer.files import write_durably
from finetune_trainer.observe.lines import JsonLines, read_lines


def kept_lines(text: str, resumed_step: int) -> list[dict[str, Any]]:
    """The lines up to the resumed step; later ones are written again, and a line cut off by a crash goes."""
    return [line for line in read_lines(text) if isinstance(line.get("step"), int) and line["step"] <= resumed_step]


class History:
    """Appends lines; losing the last ones in a crash does no harm, because a resumed run writes them again."""

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        """`resumed_step`: None for a run from the start. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(errors="replace") if path.exists() and resumed_step is not None else ""
        kept = kept_lines(before, resumed_step or 0)
        write_durably(path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        self._lines = JsonLines(path)
        self.tokens: int = sum(line.get("tokens", 0) for line in kept)
        """Computed in all steps that count."""
        self.resumed: dict[str, Any] = kept[-1] if kept else {}
        """Line of the step after which the run goes on."""

    def append(self, **values: Any) -> None:
        """Add one line; what is not known is left out."""
        self.tokens += values.get("tokens", 0)
        self._lines.append({name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
