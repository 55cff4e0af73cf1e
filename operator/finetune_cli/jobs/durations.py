"""Parses and formats durations such as `1h30m`."""

from __future__ import annotations

import re

from finetune_cli.exit_codes import LocalError

_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_FORM = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")
_MOST = 10 * 365 * 86_400


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of a duration such as `90`, `90s`, `10m`, `1h30m` or `2d`. Raises LocalError."""
    match = _FORM.fullmatch(text.strip()) if text.strip() else None
    if match is None:
        raise LocalError(f"{option}: {text!r} is not a length of time; write 90s, 10m, 1h30m or 2d")
    seconds = sum(float(number) * unit for number, unit in zip(match.groups(), _UNITS.values(), strict=True) if number)
    if seconds > _MOST:
        raise LocalError(f"{option}: {text!r} is more than ten years; write a shorter time")
    return seconds


def duration_text(seconds: float | None) -> str:
    """Return a duration in its two largest units: `2d3h`, `1h05m`, `4m10s`, `12s`; empty for None."""
    if seconds is None:
        return ""
    whole = int(max(seconds, 0.0))
    for (large, size), (small, part) in zip(list(_UNITS.items())[:-1], list(_UNITS.items())[1:], strict=True):
        if whole >= size:
            return f"{whole // size}{large}{whole % size // part:0{1 if small == 'h' else 2}}{small}"
    return f"{whole}s"
