"""What a run would lose if a queue preempted it now, as a rise of its priority."""

from __future__ import annotations

from math import floor, isfinite

from finetune_job.plan.launch_plan import CheckpointInterval
from finetune_job.progress import Progress

STEPS_OF_A_BOOST = 4
"""It rises by quarters, because every change is a write."""


def priority_boost(most: int, progress: Progress, interval: CheckpointInterval) -> int:
    """0 right after a complete checkpoint, `most` right before the next is due and until it is complete; in whole quarters between.

    What is lost is counted from the latest complete checkpoint, so an asynchronous one that is still being written counts for
    nothing. A checkpoint that is due by the clock is expected by the pace of the steps.
    """
    lost_steps = progress.step - (progress.checkpoint_step or 0)
    shares = [0.0]
    if interval.every_steps > 0:
        shares.append(lost_steps / interval.every_steps)
    pace = progress.step_seconds_median
    # The numbers come from a container, which may send any.
    if interval.every_seconds and pace is not None and isfinite(pace):
        shares.append(lost_steps * pace / interval.every_seconds)
    share = min(max(shares), 1.0)
    return most * floor(share * STEPS_OF_A_BOOST + 0.5) // STEPS_OF_A_BOOST
