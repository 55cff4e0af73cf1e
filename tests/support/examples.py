"""How much a test draws: `make test` draws the same every time, so it draws less than `make explore`, which draws new ones."""

from __future__ import annotations

import os


def examples(same: int, new: int) -> int:
    """`same` when every run draws the same examples, `new` when nobody has tried them before."""
    return new if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else same
