"""How often to save a run that keeps losing attempts. Pure.

Young (1974) balances the time that saves take against the steps that a loss discards; Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps" (2006), equation 37, corrects it for frequent losses.
"""

from __future__ import annotations

import math


def best_interval(save_seconds: float, seconds_between_losses: float) -> float:
    """Seconds from one save to the next that lose the least time.

    save_seconds: time that steps wait for a save. seconds_between_losses: mean; it is the interval itself if it is at most half a
    save.
    """
    if save_seconds >= 2 * seconds_between_losses:
        return seconds_between_losses
    share = save_seconds / (2 * seconds_between_losses)
    young = math.sqrt(2 * save_seconds * seconds_between_losses)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds
