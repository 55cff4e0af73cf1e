"""Sizes as people write them elsewhere, such as 100GB or 1.5 t -> as a field takes them.

proposals.py asks for them where a field wants a size, as addresses.py for a source or a destination.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_UNITS = {
    "": "G",
    "b": "",
    **{
        spelt: letter
        for letter in "KMGT"
        for spelt in (letter.lower(), f"{letter}b".lower(), f"{letter}i".lower(), f"{letter}ib".lower())
    },
}


def likely_sizes(text: str, fits: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Sizes of the same number and about the same unit; certain if there was a unit at all."""
    found = re.fullmatch(r"\s*([0-9]{1,10})(?:\.([0-9]{1,3}))?\s*([A-Za-z]{0,3})\s*", text)
    if found is None or found[3].lower() not in _UNITS:
        return
    number, fraction, unit = int(found[1]), found[2] or "", _UNITS[found[3].lower()]
    lower = {"T": "G", "G": "M", "M": "K"}.get(unit)
    if fraction.strip("0"):
        if lower is None:
            return
        number, unit = -(-1024 * int(found[1] + fraction) // 10 ** len(fraction)), lower
        spelt = [f"{number}{unit}i"]
    else:
        binary, decimal = f"{number}{unit}i", [f"{number}{unit}B", f"{number}{unit}"]
        spelt = [binary, *decimal] if "i" in found[3].lower() or not found[3] else [*decimal, binary]
    yield from ((size, bool(found[3])) for size in spelt if fits(size))
