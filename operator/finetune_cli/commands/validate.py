"""`finetune validate`: the text of a manifest in, a verdict for each of its documents out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from finetune_cli.documents import Document, DocumentError, problem, read_documents
from finetune_cli.exit_codes import ExitCode
from finetune_cli.manifest import parse_job, parse_profile
from finetune_job.api.job import FineTuneJob
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import API_VERSION, DEFAULT_PROFILE, GROUP, JOB_KIND, PROFILE_KIND
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import Choice, JobIdentity, RunPlan
from finetune_job.rules.book import evaluate
from finetune_job.rules.context import RuleContext
from finetune_job.rules.rule import Finding


class Outcome(StrEnum):
    """What became of one document."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """A rule speaks against it."""
    UNUSABLE = "unusable"
    """It is no FineTuneJob."""
    SKIPPED = "skipped"
    """An object of another kind beside the jobs."""


@dataclass(frozen=True)
class Verdict:
    """What is to say about one document."""

    document: int
    kind: str
    name: str
    outcome: Outcome
    findings: tuple[Finding, ...] = ()
    job: FineTuneJob | None = None
    """What was parsed, where it is a job."""
    plan: RunPlan | None = None
    """Of an accepted job."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What the manifest left open and how it was chosen."""
        return self.plan.choices if self.plan is not None else ()


@dataclass(frozen=True)
class Report:
    """What is to say about a file."""

    verdicts: tuple[Verdict, ...]

    @property
    def exit_code(self) -> ExitCode:
        """The worst of the documents."""
        outcomes = {verdict.outcome for verdict in self.verdicts}
        if Outcome.UNUSABLE in outcomes:
            return ExitCode.UNUSABLE
        return ExitCode.REFUSED if Outcome.REFUSED in outcomes else ExitCode.DONE


def validate(manifest: str, profile: str | None = None) -> Report:
    """Judge every FineTuneJob of `manifest` with the profile in `profile`, or with the one in the manifest that it names."""
    try:
        documents = read_documents(manifest)
    except DocumentError as error:
        return Report((_unusable(0, "", "", (error.finding,)),))
    profiles = _Profiles()
    verdicts = [verdict for document in documents if (verdict := profiles.add(document)) is not None]
    if profile is not None:
        verdicts += profiles.take_only(profile)
    verdicts += [_job_verdict(document, profiles) for document in documents if _kind(document.content) == JOB_KIND]
    judged = {verdict.document for verdict in verdicts}
    known_job = any(_kind(document.content) == JOB_KIND for document in documents)
    for document in documents:
        if document.number not in judged:
            verdicts.append(_other(document, known_job))
    return Report(tuple(sorted(verdicts, key=lambda verdict: verdict.document)))


def judge(job: FineTuneJob, profile: FineTuneProfileSpec | None) -> tuple[Outcome, tuple[Finding, ...]]:
    """What the rules say about a job."""
    findings = evaluate(RuleContext(job.spec, profile))
    refused = any(finding.severity == "error" for finding in findings)
    return (Outcome.REFUSED if refused else Outcome.ACCEPTED), findings


class _Profiles:
    """Profiles by name."""

    def __init__(self) -> None:
        self._specs: dict[str, FineTuneProfileSpec] = {}
        self._only: FineTuneProfileSpec | None = None

    def add(self, document: Document) -> Verdict | None:
        """Take a profile; None for a document that is none."""
        if _kind(document.content) != PROFILE_KIND:
            return None
        parsed = parse_profile(document.content)
        if isinstance(parsed, list):
            return _unusable(document.number, PROFILE_KIND, _name(document.content), tuple(parsed))
        self._specs[parsed.metadata.name] = parsed.spec
        return Verdict(document.number, PROFILE_KIND, parsed.metadata.name, Outcome.ACCEPTED)

    def take_only(self, text: str) -> list[Verdict]:
        """Judge every job with the profile in `text`; what is wrong with it."""
        try:
            documents = read_documents(text)
        except DocumentError as error:
            return [_unusable(0, PROFILE_KIND, "", (error.finding,))]
        parsed = parse_profile(documents[0].content)
        if isinstance(parsed, list):
            return [_unusable(0, PROFILE_KIND, _name(documents[0].content), tuple(parsed))]
        self._only = parsed.spec
        return []

    def of(self, job: FineTuneJob) -> FineTuneProfileSpec | None:
        """The profile of a job, where it is known."""
        return self._only or self._specs.get(job.spec.profile or DEFAULT_PROFILE)


def _job_verdict(document: Document, profiles: _Profiles) -> Verdict:
    job = parse_job(document.content)
    if isinstance(job, list):
        return _unusable(document.number, JOB_KIND, _name(document.content), tuple(job))
    profile = profiles.of(job)
    outcome, findings = judge(job, profile)
    verdict = Verdict(document.number, JOB_KIND, job.metadata.name, outcome, findings, job)
    if outcome is Outcome.REFUSED:
        return verdict
    identity = JobIdentity(namespace=job.metadata.namespace, name=job.metadata.name, uid=job.metadata.uid)
    return replace(verdict, plan=resolve(identity, job.spec, profile))


def _other(document: Document, beside_a_job: bool) -> Verdict:
    """A document that is neither a job nor a profile."""
    content = document.content
    is_object = isinstance(content, dict) and bool(content.get("apiVersion")) and bool(content.get("kind"))
    if beside_a_job and is_object and not str(content["apiVersion"]).startswith(f"{GROUP}/"):
        return Verdict(document.number, str(content["kind"]), _name(content), Outcome.SKIPPED)
    if not isinstance(content, dict):
        finding = problem(
            "document", str(content)[:60], "is not an object", f"start with apiVersion: {API_VERSION} and kind: {JOB_KIND}"
        )
    elif "kind" not in content:
        finding = problem("kind", "unset", "is required", f"write kind: {JOB_KIND}")
    else:
        finding = problem("kind", content["kind"], f"is not {JOB_KIND}", f"give a manifest of kind {JOB_KIND}")
    return _unusable(document.number, _kind(content), _name(content), (finding,))


def _unusable(number: int, kind: str, name: str, findings: tuple[Finding, ...]) -> Verdict:
    return Verdict(number, kind, name, Outcome.UNUSABLE, findings)


def _kind(content: Any) -> str:
    return str(content.get("kind", "")) if isinstance(content, dict) else ""


def _name(content: Any) -> str:
    metadata = content.get("metadata") if isinstance(content, dict) else None
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
