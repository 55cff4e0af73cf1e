"""What a FineTuneProfile says of itself: whether jobs can name it, in the words that such a job has, too."""

from __future__ import annotations

from finetune_job.api.status import Condition, FineTuneProfileStatus
from finetune_job.conditions import with_condition
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.observed import ProfileView


def invalid_profile(profile: ProfileView) -> str:
    """Why a profile that is not valid is not."""
    return f"FineTuneProfile {profile.name!r} is not valid: {profile.error}"


def profile_status(profile: ProfileView, before: list[Condition], *, generation: int, now: str) -> FineTuneProfileStatus:
    """The status of a profile. `before`: its conditions as they are; `now`: RFC 3339."""
    ready, reason, message = True, Reason.ACCEPTED, "Jobs can name it."
    if profile.spec is None:
        ready, reason, message = False, Reason.PROFILE_INVALID, invalid_profile(profile)
    elif profile.spec.allowed_namespaces == []:
        ready, reason = False, Reason.PROFILE_NOT_ALLOWED
        message = "spec.allowedNamespaces is empty, so no job may name it. List namespaces, or remove the field to allow all."
    conditions = with_condition(before, ConditionType.READY, ready, reason, message, generation=generation, now=now)
    return FineTuneProfileStatus(observed_generation=generation, conditions=conditions)
