"""What a rule may look at: the manifest, the profile, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec


@dataclass(frozen=True)
class RuleContext:
    """Input of every rule."""

    spec: FineTuneJobSpec
    profile: FineTuneProfileSpec | None = None
    """None where no profile is known, as in `finetune validate` on a laptop without one."""
