"""The status of a FineTuneProfile: whether jobs can name it, with the same messages as in the status of such a job."""

from __future__ import annotations

from finetune_job.api.status import Condition, FineTuneProfileStatus
from finetune_job.conditions import with_condition
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.observed import NamespaceView, ProfileView


def invalid_profile(profile: ProfileView) -> str:
    """Explain why a profile is not valid."""
    return f"FineTuneProfile {profile.name!r} is not valid: {profile.error}"


def refused_namespace(profile: ProfileView, name: str, namespace: NamespaceView | None) -> str:
    """Why jobs of the namespace may not name a valid profile; empty if they may. `namespace`: its labels, if the profile
    selects by them.
    """
    if profile.spec is None or profile.spec.allows_namespace(name):
        return _refused_by_labels(profile, name, namespace or NamespaceView(error="it was not read"))
    return (
        f"FineTuneProfile {profile.name!r} is not for namespace {name!r} (allowedNamespaces). Name another profile, or ask the "
        "platform team to add the namespace."
    )


def _refused_by_labels(profile: ProfileView, name: str, namespace: NamespaceView) -> str:
    selector = profile.spec.namespace_selector if profile.spec is not None else None
    if selector is None:
        return ""
    if namespace.error:
        return (
            f"FineTuneProfile {profile.name!r} asks for labels of the namespace (namespaceSelector), and the operator cannot "
            f"read Namespace {name!r}: {namespace.error}. Name another profile, or ask the platform team for the right."
        )
    if not selector.selects(namespace.labels):
        return (
            f"FineTuneProfile {profile.name!r} is not for namespace {name!r}, whose labels are not those of its "
            "namespaceSelector. Name another profile, or ask the platform team to label the namespace."
        )
    return ""


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
