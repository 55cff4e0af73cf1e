"""Python's garbage collector in processes of the tests, which have loaded torch and every test: a million objects to look
through.

With the interpreter's own thresholds that is a quarter of all the time that tests compute.
"""

import gc

THRESHOLDS = (50_000, 20, 50)
"""New objects before a collection of the youngest, and how many of those before one of the next generation."""


def collect_rarely() -> None:
    """Collect garbage rarely from now on. Call this before many imports."""
    gc.set_threshold(*THRESHOLDS)


def leave_what_is_there() -> None:
    """Never look at it again."""
    gc.collect()
    gc.freeze()
