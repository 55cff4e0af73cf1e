"""`submit`, `suspend`, `resume`, `cancel`, `retry` and `fork`: create jobs, change a job's `spec.run`, or print a manifest."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from finetune_cli.checks.validate import DocumentVerdict, Report, validate_files
from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster, Unseen, collection, unless_refused
from finetune_cli.documents import document_text, objects_of, read_documents
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.jobs import documents
from finetune_cli.jobs.next_manifest import copy_of, fork_of, next_name, start_changes
from finetune_cli.jobs.profiles import profile_manifest, read_profile
from finetune_cli.jobs.seen import SeenJob, place_flags
from finetune_job.api.job import parse_job
from finetune_job.api.output import RetainPolicy
from finetune_job.finding import FieldChange
from finetune_job.names import (
    API_VERSION,
    DEFAULT_PROFILE,
    JOB_KIND,
    JOB_PLURAL,
    MERGE_PATCH,
    PROFILE_KIND,
    PROFILE_PLURAL,
    workspace_claim_name,
)

STRICT = {"fieldValidation": "Strict"}
"""Makes a server of another release refuse fields that it does not know, instead of dropping them silently."""
NEWEST = "newest"
"""Value of `--from` for the checkpoint that the status of a job names."""
_STEP_DIGITS = 10
MOST_CONFLICTS = 5
"""How often another client may change a job between our read and our change before the command gives up."""


@dataclass(frozen=True)
class Change:
    """A change that a command made to a job."""

    job: SeenJob
    said: str
    """The change in words, without the job's name."""
    changed: bool = True

    def text(self) -> str:
        """Return the answer as text."""
        return f"{self.job.title}: {self.said}\n"

    def document(self) -> dict[str, Any]:
        """Return the answer as data."""
        run = self.job.spec.get("run")
        return {
            "namespace": self.job.namespace,
            "name": self.job.name,
            "uid": self.job.uid,
            "changed": self.changed,
            "run": dict(run) if isinstance(run, dict) else {},
            "message": self.said,
        }


def submit(
    cluster: Cluster, text: str, file: str, namespace: str | None, *, is_watched: bool = False
) -> tuple[Report, list[Change]]:
    """Create the jobs of a manifest, unless the rules refuse one. The rules use the cluster's profile if it can be read.

    `namespace`: as the user gave it. `is_watched`: more than one job is an error. Raises LocalError, ClusterError.
    """
    report = validate_files([(file, text)], _profile_text(cluster, text, file))
    if report.exit_code is not ExitCode.DONE:
        return report, []
    objects = [item.content for document in read_documents(text, file) for item in objects_of(document)]
    jobs = [content for content in objects if isinstance(content, dict) and content.get("kind") == JOB_KIND]
    if not jobs:
        raise LocalError(f"{file} holds no FineTuneJob; other objects are created with kubectl apply")
    if is_watched and len(jobs) > 1:
        command = shlex.join(["finetune", "list", "--watch", *place_flags(namespace or cluster.namespace, cluster.context)])
        raise LocalError(f"--watch: follows one job, and {file} holds {len(jobs)}; leave it out, and use `{command}`")
    places = [_place(job, cluster, namespace) for job in jobs]
    return report, [_create(cluster, job, place) for job, place in zip(jobs, places, strict=True)]


def _place(document: dict[str, Any], cluster: Cluster, namespace: str | None) -> str:
    metadata = document.get("metadata")
    written = metadata.get("namespace") if isinstance(metadata, dict) else None
    if written and namespace and written != namespace:
        raise LocalError(f"metadata.namespace: {written} is not {namespace} of -n; leave one of the two out")
    return str(written or cluster.namespace)


def _profile_text(cluster: Cluster, text: str, file: str) -> str | None:
    """Return the jobs' profile in the cluster as a manifest; None if they name several, the file has one, or reading fails."""
    verdicts: Sequence[DocumentVerdict] = validate_files([(file, text)], None).verdicts
    names = {verdict.job.spec.profile or DEFAULT_PROFILE for verdict in verdicts if verdict.job is not None}
    if len(names) != 1 or any(verdict.kind == PROFILE_KIND for verdict in verdicts):
        return None
    name = names.pop()
    profile = unless_refused(lambda: cluster.get(API_VERSION, PROFILE_PLURAL, name, ""))
    # If this release cannot read the profile, the jobs are judged without it.
    if profile is None or isinstance(profile, Unseen) or isinstance(read_profile(profile.get("spec")), str):
        return None
    return profile_manifest(name, profile["spec"])


def _create(cluster: Cluster, document: dict[str, Any], namespace: str) -> Change:
    path = collection(API_VERSION, JOB_PLURAL, namespace)
    name = str(document["metadata"]["name"])
    try:
        made = cluster.send("POST", path, document, query=STRICT)
    except ClusterError as error:
        if error.status != 409:
            raise
        raise _conflict(cluster.within(namespace), name, document) from error
    return Change(cluster.seen(made), "created")


def _conflict(cluster: Cluster, name: str, document: dict[str, Any]) -> ClusterError:
    title = f"{cluster.namespace}/{name}"
    existing = unless_refused(lambda: cluster.job(name))
    if isinstance(existing, Unseen):
        return ClusterError(f"{title} exists already; give the manifest another name", status=409)
    try:
        is_same = parse_job({**existing.document, "status": None}).spec == parse_job(document).spec
    except ValidationError:
        is_same = False
    fix = "give the manifest another name: a job that has started stays as it is"
    difference = f"the same spec; `{existing.command('status')}` shows it" if is_same else f"another spec; {fix}"
    return ClusterError(f"{title} exists already ({existing.phase}), with {difference}", status=409)


def set_suspended(cluster: Cluster, name: str, *, suspended: bool) -> Change:
    """Suspend a job, which deletes its pods and keeps its checkpoint, or resume it. Raises ClusterError."""
    job = cluster.job(name)
    _check_living(job, "suspended" if suspended else "resumed")
    if _run(job).get("suspend", False) is suspended:
        return Change(job, "suspended already" if suspended else "not suspended", changed=False)
    message = (
        f"suspended: its pods end, its checkpoint stays; `{job.command('resume')}` continues from there"
        if suspended
        else "resumed: it continues from its latest checkpoint"
    )
    return Change(_patched(cluster, name, {"suspend": suspended}), message)


def cancel(cluster: Cluster, name: str) -> Change:
    """End a job for good. Raises ClusterError."""
    job = cluster.job(name)
    if _run(job).get("cancel") is True:
        return Change(job, "cancelled already", changed=False)
    _check_living(job, "cancelled")
    message = f"cancelled: its pods end, what is on its claims stays; `{job.command('fork')}` makes a manifest from it"
    return Change(_patched(cluster, name, {"cancel": True}), message)


def retry(cluster: Cluster, name: str, new_name: str | None) -> Change:
    """Retry a stalled job, or create a new job with the spec of one that ended without success. Raises ClusterError."""
    for _ in range(MOST_CONFLICTS):
        job = cluster.job(name)
        if job.phase == "Succeeded":
            message = f"{job.title} has succeeded; `{job.command('fork')}` makes a manifest with changes from it"
            raise ClusterError(message, ExitCode.REFUSED)
        if job.has_ended:
            copy = copy_of(job.document, new_name or next_name(job.name, _names(cluster)))
            made = _create(cluster, copy, job.namespace)
            return Change(made.job, f"created with the spec of {job.name}; it begins with {_beginning(job.document)}")
        if new_name is not None:
            raise ClusterError(f"{job.title} has not ended, so it is tried again under its own name; leave --name out")
        if job.phase != "Stalled":
            raise ClusterError(f"{job.title} is {job.phase}, so there is nothing to try again", ExitCode.REFUSED)
        before = _run(job).get("retry")
        number = before + 1 if isinstance(before, int) else 1
        try:
            patched = _patched(cluster, name, {"retry": number}, job.resource_version)
        except ClusterError as error:
            if error.status != 409:
                raise
            continue
        return Change(patched, f"trying again (spec.run.retry: {number})")
    raise ClusterError(f"{cluster.namespace}/{name}: other clients keep changing it; try again")


def fork(
    cluster: Cluster, name: str, new_name: str | None, changes: Sequence[FieldChange], start: str | None = None
) -> tuple[str, Report]:
    """Make a manifest from a job, and judge it by the rules.

    start: step of the job's checkpoint that the new job starts from, or `newest`; None: the base model.
    Raises ClusterError, LocalError.
    """
    job = cluster.job(name)
    step = None if start is None else _step_of(job, start)
    first = [] if step is None else start_changes(job.document, step)
    document = fork_of(job.document, new_name or next_name(name, _names(cluster)), [*first, *changes])
    head = f"# From the FineTuneJob {job.title}. It begins with {_beginning(document)}.\n"
    if step is not None:
        head = (
            f"# From the FineTuneJob {job.title}. It begins with what that had trained after step {step}; schedule and\n"
            "# optimizer begin again. The checkpoint has to be there until the new job has saved one of its own.\n"
        )
        claim, retain = workspace_claim_name(job.name), documents.text(job.spec, "workspace", "retain")
        if documents.text(document, "spec", "workspace", "claimName") == claim and retain == RetainPolicy.DELETE:
            head += (
                f"# Its workspace is the claim {claim}. Deleting {job.name} also deletes that claim (spec.workspace.retain: "
                f"Delete)\n# and all that the new job has trained. Keep {job.name} until the new job is done.\n"
            )
    text = head + document_text(document)
    return text, validate_files([(f"fork of {name}", text)], _profile_text(cluster, text, name))


def _beginning(document: Mapping[str, Any]) -> str:
    """Say what a job starts from. A copy of a forked job starts from the same checkpoint as the fork."""
    start = documents.text(document, "spec", "training", "startFrom")
    return f"the checkpoint {start} of its workspace" if start else "the base model"


def _step_of(job: SeenJob, start: str) -> int:
    if start != NEWEST:
        if not start.isdecimal() or len(start) > _STEP_DIGITS or int(start) == 0:
            raise LocalError(
                f"--from {start} is not a step; write one that `{job.command('status', '--checkpoints')}` shows, or {NEWEST}"
            )
        return int(start)
    newest = job.status.progress.checkpoint_step if job.status.progress is not None else None
    if newest is None:
        raise LocalError(
            f"--from {NEWEST}: the status of {job.title} names no checkpoint; see `{job.command('status', '--checkpoints')}`"
        )
    return newest


def _names(cluster: Cluster) -> list[str]:
    """List the names of the jobs; empty if they may not be listed: the API server then refuses a name that is taken."""
    names = unless_refused(lambda: [job.name for job in cluster.jobs()])
    return [] if isinstance(names, Unseen) else names


def _check_living(job: SeenJob, what: str) -> None:
    if job.has_ended:
        raise ClusterError(f"{job.title} has ended ({job.phase}) and cannot be {what}", ExitCode.REFUSED)


def _run(job: SeenJob) -> dict[str, Any]:
    run = job.spec.get("run")
    return run if isinstance(run, dict) else {}


def _patched(cluster: Cluster, name: str, run: dict[str, Any], version: str = "") -> SeenJob:
    """Change spec.run of a job. `version`: resource version that the job must still have."""
    path = f"{collection(API_VERSION, JOB_PLURAL, cluster.namespace)}/{quote(name, safe='')}"
    patch: dict[str, Any] = {"spec": {"run": run}}
    if version:
        patch["metadata"] = {"resourceVersion": version}
    return cluster.seen(cluster.send("PATCH", path, patch, MERGE_PATCH))
