"""The tokens at which generation with a model stops, as its files say. Called by tokenizer.py of preflight and by prepare.py."""

from __future__ import annotations

import json
from pathlib import Path

from finetune_trainer.data.chat import Tokenizer


def generation_stops(tokenizer: Tokenizer, directory: Path) -> set[int]:
    """What the files of the model in `directory` say, and where they do not, the tokenizer's end token."""
    for name in ("generation_config.json", "config.json"):
        try:
            written = json.loads((directory / name).read_text())
        except (OSError, ValueError, RecursionError):  # no such file, or one of which others say that it is wrong
            continue
        for part in (written, written.get("text_config")) if isinstance(written, dict) else ():
            value = part.get("eos_token_id") if isinstance(part, dict) else None
            declared = {number for number in (value if isinstance(value, list) else [value]) if type(number) is int}
            if declared:
                return declared
    return {int(tokenizer.eos_token_id)}
