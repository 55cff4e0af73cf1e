"""The base model's licence, as its own files state it: a tuned model is a derivative, so the base's terms still apply."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune_trainer.files import licence_files

CARD_FILE = "README.md"
_MAX_FRONT_MATTER = 1 << 20
_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
"""Pattern of the Hub's licence identifiers."""
OTHER_LICENCE = "other"
"""The Hub's name for a licence that is not in its list."""
_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Licence:
    """The base's licence. Strings are empty if the base does not state them."""

    identifier: str = ""
    """The Hub's identifier for the licence."""
    name: str = ""
    link: str = ""
    files: tuple[str, ...] = ()
    """Licence files in the base's directory."""

    @property
    def is_known(self) -> bool:
        return bool(self.identifier or self.files)


def read_licence(model: Path) -> Licence:
    """Read the licence from the base's card, or else its configuration, and list its licence files. Raises OSError."""
    files, text, config = tuple(path.name for path in licence_files(model)), "", None
    if (model / CARD_FILE).is_file():
        with (model / CARD_FILE).open("rb") as file:
            text = file.read(_MAX_FRONT_MATTER).decode(errors="replace")
    with suppress(OSError, ValueError):
        config = json.loads((model / "config.json").read_bytes())
    card = read_front_matter(text)
    named = _identifier(config.get("license")) if isinstance(config, dict) else ""
    identifier = _identifier(card.get("license")) or named
    if not identifier:
        return Licence(files=files)
    return Licence(identifier, _line(card.get("license_name")), _line(card.get("license_link")), files)


def read_front_matter(text: str) -> dict[str, Any]:
    """Return the front matter at the head of a card; empty if there is none or it cannot be read."""
    match = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    if match is None:
        return {}
    try:
        document = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError):
        return {}
    return {str(key): value for key, value in document.items()} if isinstance(document, dict) else {}


def _identifier(value: object) -> str:
    first = value[0] if isinstance(value, list) and value else value
    return first.lower() if isinstance(first, str) and _IDENTIFIER.fullmatch(first.lower()) else ""


def _line(value: object) -> str:
    return " ".join(value.split())[:_LONGEST_TEXT] if isinstance(value, str) else ""
