"""Which files of a model are its terms: they are fetched with it and published with everything that is made of it."""

from __future__ import annotations

from pathlib import Path

LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
"""Beginnings of their names, in capitals."""


def licence_files(model: Path) -> list[Path]:
    """The terms in a model's directory."""
    return sorted(path for path in model.iterdir() if path.is_file() and path.name.upper().startswith(LICENCE_NAMES))
