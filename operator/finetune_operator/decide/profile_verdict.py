"""The status of a FineTuneProfile: whether jobs can use it. Jobs that name the profile show the same messages."""

from __future__ import annotations

from finetune_job.api.status import Condition, FineTuneProfileStatus
from finetune_job.conditions import with_condition
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.seen.observed import NamespaceView, ProfileView


def invalid_profile(profile: ProfileView) -> str:
    """Explain why a profile is not valid."""
    return f"FineTuneProfile {profile.name!r} is not valid: {profile.error}"


def refused_namespace(profile: ProfileView, name: str, namespace: NamespaceView | None) -> str:
    """Explain why jobs of a namespace may not use a valid profile; empty if they may. `namespace`: the namespace with its labels;
    only needed if the profile selects by labels.
    """
    spec = profile.spec
    if spec is not None and not spec.allows_namespace(name):
        return (
            f"FineTuneProfile {profile.name!r} does not allow namespace {name!r} (allowedNamespaces). Name another profile, or "
            "ask the platform team to add the namespace."
        )
    if spec is None or spec.namespace_selector is None:
        return ""
    namespace = namespace or NamespaceView(error="it was not read")
    if namespace.error:
        return (
            f"FineTuneProfile {profile.name!r} selects namespaces by label (namespaceSelector), but the operator cannot read "
            f"Namespace {name!r}: {namespace.error}. Name another profile, or ask the platform team for the permission."
        )
    if not spec.namespace_selector.selects(namespace.labels):
        return (
            f"FineTuneProfile {profile.name!r} does not allow namespace {name!r}, whose labels do not match its "
            "namespaceSelector. Name another profile, or ask the platform team to label the namespace."
        )
    return ""


def profile_status(profile: ProfileView, before: list[Condition], *, generation: int, now: str) -> FineTuneProfileStatus:
    """Return the status of a profile. `before`: its current conditions; `now`: RFC 3339."""
    ready, reason, message = True, Reason.ACCEPTED, "Jobs can use this profile."
    if profile.spec is None:
        ready, reason, message = False, Reason.PROFILE_INVALID, invalid_profile(profile)
    elif profile.spec.allowed_namespaces == []:
        ready, reason = False, Reason.PROFILE_NOT_ALLOWED
        message = "spec.allowedNamespaces is empty, so no job may use it. List namespaces, or remove the field to allow all."
    conditions = with_condition(before, ConditionType.READY, ready, reason, message, generation=generation, now=now)
    return FineTuneProfileStatus(observed_generation=generation, conditions=conditions)
