"""`explain job/NAME`: the diagnosis of a job, and a patch that the rules accept."""

from __future__ import annotations

import json
from typing import Any

import yaml

from finetune_cli.checks.fix import fix
from finetune_cli.checks.validate import validate_files
from finetune_cli.cluster.objects import Cluster, Unseen, unless_refused
from finetune_cli.commands.inspect_jobs import CommandAnswer, utc_now
from finetune_cli.exit_codes import ExitCode
from finetune_cli.jobs.diagnosis import diagnose, last_failure
from finetune_cli.jobs.patches import Patch, merge_patch
from finetune_cli.jobs.profiles import profile_manifest
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.render.diagnosis import diagnosis_document, diagnosis_text
from finetune_job.failures import FailureClass
from finetune_job.names import API_VERSION, JOB_KIND, PROFILE_PLURAL
from finetune_job.reasons import Reason


def examine(cluster: Cluster, name: str) -> CommandAnswer:
    """Diagnose a job with those of its pods and events that can be read. Raises ClusterError."""
    job = cluster.job(name)
    pods = unless_refused(lambda: cluster.pods_of(job))
    seen_pods = [] if isinstance(pods, Unseen) else pods
    events = unless_refused(lambda: cluster.events_of(job, seen_pods))
    is_refused = any(condition.reason in (Reason.REFUSED, Reason.INVALID_SPEC) for condition in job.status.conditions)
    failed = last_failure(job)
    profile: dict[str, Any] | Unseen | None = None
    if is_refused or (failed is not None and failed.failure is FailureClass.HOST_OUT_OF_MEMORY):
        # The diagnosis depends on the profile only for these failures.
        profile = unless_refused(lambda: cluster.get(API_VERSION, PROFILE_PLURAL, job.profile, ""))
    seen_profile = profile if isinstance(profile, dict) else None
    fixes = None
    if is_refused:
        fixes = rule_patch(job, None if seen_profile is None else profile_manifest(job.profile, seen_profile.get("spec")))
    parts = {"pods": pods, "events": events, "profile": profile}
    unseen = [f"its {part}: {answer.reason}" for part, answer in parts.items() if isinstance(answer, Unseen)]
    seen_events = [] if isinstance(events, Unseen) else events
    diagnosis = diagnose(job.with_profile(seen_profile), utc_now(), seen_pods, seen_events, fixes)
    return CommandAnswer(lambda: diagnosis_text(job, diagnosis, unseen), lambda: diagnosis_document(job, diagnosis, unseen))


def rule_patch(job: SeenJob, profile: str | None) -> Patch | None:
    """Return the changes of `finetune validate --fix` as a patch; None if the manifest is still refused with them."""
    manifest = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": job.name}, "spec": dict(job.spec)}
    (fixed,) = fix([("job", json.dumps(manifest))], profile)
    if validate_files([("job", fixed.text)], profile).exit_code is not ExitCode.DONE:
        return None
    return merge_patch(manifest, yaml.safe_load(fixed.text)) or None
