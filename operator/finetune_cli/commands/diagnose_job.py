"""`explain job/NAME`: what is the matter with a job, and a patch that the rules accept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from finetune_cli.cluster.objects import Cluster, Unseen, unless_refused
from finetune_cli.commands.inspect_jobs import CommandAnswer, utc_now
from finetune_cli.exit_codes import ExitCode
from finetune_cli.jobs.diagnosis import diagnose, last_failure
from finetune_cli.jobs.patches import Patch, merge_patch
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.render.diagnosis import diagnosis_document, diagnosis_text
from finetune_job.failures import FailureClass
from finetune_job.names import API_VERSION, JOB_KIND, PROFILE_KIND, PROFILE_PLURAL
from finetune_job.reasons import Reason


def examine(cluster: Cluster, name: str) -> CommandAnswer:
    """The diagnosis of a job with what can be seen of its pods and events. Raises ClusterError."""
    job = cluster.job(name)
    pods = unless_refused(lambda: cluster.pods_of(job))
    seen_pods = [] if isinstance(pods, Unseen) else pods
    events = unless_refused(lambda: cluster.events_of(job, seen_pods))
    seen_events = [] if isinstance(events, Unseen) else events
    unseen = [f"its pods: {pods.reason}"] if isinstance(pods, Unseen) else []
    unseen += [f"its events: {events.reason}"] if isinstance(events, Unseen) else []
    profile = unless_refused(lambda: cluster.get(API_VERSION, PROFILE_PLURAL, job.profile, "")) if _asks_profile(job) else None
    unseen += [f"its profile: {profile.reason}"] if isinstance(profile, Unseen) else []
    seen_profile = profile if isinstance(profile, dict) else None
    diagnosis = diagnose(job.with_profile(seen_profile), utc_now(), seen_pods, seen_events, _fixes(job, seen_profile))
    return CommandAnswer(lambda: diagnosis_text(job, diagnosis, unseen), lambda: diagnosis_document(job, diagnosis, unseen))


def _is_refused(job: SeenJob) -> bool:
    return any(each.reason in (Reason.REFUSED, Reason.INVALID_SPEC) for each in job.status.conditions)


def _asks_profile(job: SeenJob) -> bool:
    """Whether the answer depends on the profile."""
    failed = last_failure(job)
    return _is_refused(job) or (failed is not None and failed.failure is FailureClass.HOST_OUT_OF_MEMORY)


def _fixes(job: SeenJob, profile: Mapping[str, Any] | None) -> Patch | None:
    """The changes of the rules to a refused manifest, as a patch."""
    if not _is_refused(job):
        return None
    judged_with = None
    if profile is not None:
        judged_with = json.dumps(
            {"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": {"name": job.profile}, "spec": profile.get("spec")}
        )
    return rule_patch(job, judged_with)


def rule_patch(job: SeenJob, profile: str | None) -> Patch | None:
    """The changes of `finetune validate --fix` as a patch; None if the manifest is still refused afterwards."""
    from finetune_cli.checks.fix import fix
    from finetune_cli.checks.validate import validate_files

    manifest = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": job.name}, "spec": dict(job.spec)}
    (fixed,) = fix([("job", json.dumps(manifest))], profile)
    if validate_files([("job", fixed.text)], profile).exit_code is not ExitCode.DONE:
        return None
    return merge_patch(manifest, yaml.safe_load(fixed.text)) or None
