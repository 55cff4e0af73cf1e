"""What a rule may look at: the manifest, the profile, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.method_settings import WrongSetting, peft_fields
from finetune_job.methods import METHODS, Family
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan

_NOBODY = JobIdentity(namespace="", name="", uid="")


@dataclass(frozen=True)
class RuleContext:
    """Input of every rule."""

    spec: FineTuneJobSpec
    profile: FineTuneProfileSpec | None = None
    """None where no profile is known, as in `finetune validate` on a laptop without one."""

    @cached_property
    def plan(self) -> RunPlan:
        """The plan that this manifest would get, made once for all rules."""
        return resolve(_NOBODY, self.spec, self.profile)

    @cached_property
    def wrong_settings(self) -> list[WrongSetting]:
        """What is wrong with `method.settings`, for the methods that have any. Finding near names is slow, so it is done once."""
        method = self.spec.method
        entry = METHODS[method.type]
        return peft_fields(method.type, method.settings or {})[1] if entry.family is Family.OTHER and not entry.refused else []
