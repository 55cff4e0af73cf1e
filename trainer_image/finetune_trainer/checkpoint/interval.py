"""Computes how often to save checkpoints of a run that keeps losing attempts.

Young (1974) balances the time that saves take against the steps lost with an attempt. Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps" (2006), equation 37, corrects this for frequent losses.
"""

from __future__ import annotations

import math


def best_interval(save_seconds: float, seconds_between_losses: float) -> float:
    """Return the number of seconds between saves that loses the least time.

    save_seconds: how long steps wait for a save. seconds_between_losses: mean time between losses. If a save takes at least twice
    that mean, the mean is returned.
    """
    if save_seconds >= 2 * seconds_between_losses:
        return seconds_between_losses
    share = save_seconds / (2 * seconds_between_losses)
    young = math.sqrt(2 * save_seconds * seconds_between_losses)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds
