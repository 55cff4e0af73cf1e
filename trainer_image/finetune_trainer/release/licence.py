"""The base model's licence, as its own files state it: a tuned model is a derivative, so its terms still apply."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune_trainer.files import licence_files

CARD_FILE = "README.md"
_MAX_FRONT_MATTER = 1 << 20
_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
"""Form of the Hub's names of licences."""
OTHER_LICENCE = "other"
"""The Hub's name for a licence that is not in its list."""
_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Licence:
    """The base's licence. Empty strings: the base states nothing."""

    identifier: str = ""
    """The Hub's name of the licence."""
    name: str = ""
    link: str = ""
    files: tuple[str, ...] = ()
    """Licence files in the base's directory."""

    @property
    def is_known(self) -> bool:
        return bool(self.identifier or self.files)


def read_licence(model: Path) -> Licence:
    """Read the licence from the base's card, its configuration and its files, in this order if they differ. Raises OSError."""
    files = tuple(path.name for path in licence_files(model))
    card = read_front_matter(_text(model / CARD_FILE))
    identifier = _identifier(card.get("license")) or _identifier(_settings(model).get("license"))
    if not identifier:
        return Licence(files=files)
    return Licence(identifier, _line(card.get("license_name")), _line(card.get("license_link")), files)


def read_front_matter(text: str) -> dict[str, Any]:
    """The mapping at the head of a card; empty if there is none that can be read."""
    match = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    if match is None:
        return {}
    try:
        document = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError):
        return {}
    return {str(key): value for key, value in document.items()} if isinstance(document, dict) else {}


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_MAX_FRONT_MATTER).decode(errors="replace")


def _settings(model: Path) -> dict[str, Any]:
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _identifier(value: object) -> str:
    first = value[0] if isinstance(value, list) and value else value
    return first.lower() if isinstance(first, str) and _IDENTIFIER.fullmatch(first.lower()) else ""


def _line(value: object) -> str:
    return " ".join(value.split())[:_LONGEST_TEXT] if isinstance(value, str) else ""
