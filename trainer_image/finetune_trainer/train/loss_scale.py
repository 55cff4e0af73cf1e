"""The factor of the loss where float16 takes part, whose smallest number, 6e-8, is above many gradients.

Dynamic, as in Micikevicius et al. 2018, Mixed precision training, section 3.2: as large as gradients allow without overflow. A step
whose gradients overflow is done again with half the factor, where other trainers leave it out, so that no record is lost and no
step is without an update. Factors are powers of two, which change no bit of what neither vanishes nor overflows. All that the next
factor depends on is in every checkpoint: a resumed run scales as the undisturbed one.
"""

from __future__ import annotations

from finetune_trainer.checkpoint.manifest import LossScale

UNSCALED = 1.0
FIRST = LossScale(factor=2.0**16)
"""Like torch.amp.GradScaler."""
LARGEST = 2.0**24
"""Losses are float32, and their sums over long batches must stay finite."""
STEPS_TO_GROW = 2000
"""Like torch.amp.GradScaler."""


def halved(factor: float) -> float | None:
    """What to try after an overflow; None: the gradients are too large by themselves."""
    return factor / 2 if factor > UNSCALED else None


def following(before: LossScale, used: float) -> LossScale:
    """For the next step. `used`: the factor with which the gradients of this one were finite."""
    if used != before.factor:
        return LossScale(factor=used)
    if before.steps + 1 < STEPS_TO_GROW:
        return LossScale(factor=used, steps=before.steps + 1)
    return LossScale(factor=min(used * 2, LARGEST))
