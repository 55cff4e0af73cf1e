"""How slow this machine is at this moment, so that a budget of processor time fails for slow code and not for a slow machine."""

from __future__ import annotations

import json
import time

_NOMINAL_SECONDS = 0.05
"""Of processor time for the piece of work below, on the machine for which budgets are written down."""
_WORK = {f"field{number}": ["text" * 4, number, {"inner": [number] * 8}] for number in range(4_000)}


def slowness() -> float:
    """As many times longer a fixed piece of work takes than on that machine; 1 on a faster one."""
    taken = min(_once() for _ in range(3))
    return max(1.0, taken / _NOMINAL_SECONDS)


def _once() -> float:
    start = time.process_time()
    text = json.dumps(_WORK)
    read = json.loads(text)
    sum(len(key) + len(value) for key, value in read.items())
    sorted(read, key=lambda key: (len(key), key[::-1]))
    return time.process_time() - start
