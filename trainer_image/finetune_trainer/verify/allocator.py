"""Memory that is let go of goes back to the system.

glibc raises the size from which a block gets pages of its own as blocks are freed, up to 32 MiB, and keeps what is below it in a
heap for each thread. Weights are loaded in one thread and used in others (lanes.py), so these heaps could grow to the size of the
model: for one model of 1.2 GiB between 180 MiB and 1.4 GiB were measured.
"""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3
"""Parameter of mallopt(3)."""
OWN_PAGES_BYTES = 1 << 20


def return_large_blocks() -> None:
    """From `OWN_PAGES_BYTES` on, blocks of this process are mapped by themselves. Without effect where there is no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, OWN_PAGES_BYTES)
