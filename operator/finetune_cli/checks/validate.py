"""`finetune validate`: reads the text of a manifest, and gives a verdict on each of its documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from finetune_cli.checks.commits import with_commits
from finetune_cli.documents import Document, DocumentError, objects_of, problem, read_documents
from finetune_cli.exit_codes import ExitCode
from finetune_cli.manifest import is_meant_as_job, parse_job, parse_profile
from finetune_job.api.job import FineTuneJob
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.device import device_text, large_on_cpu, parameters_by_name
from finetune_job.finding import Finding
from finetune_job.names import API_VERSION, DEFAULT_PROFILE, GROUP, JOB_KIND, PROFILE_KIND
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import Choice, JobIdentity, RunPlan
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext, format_value
from finetune_job.trackers import foreign_trackers


class DocumentOutcome(StrEnum):
    """Verdict on one document."""

    ACCEPTED = "accepted"
    """No rule refuses it."""
    REFUSED = "refused"
    """A rule refuses it."""
    UNUSABLE = "unusable"
    """It is not a FineTuneJob."""
    SKIPPED = "skipped"
    """An object of another kind."""


@dataclass(frozen=True)
class DocumentVerdict:
    """The verdict on one document, with its findings."""

    document: int
    """Number of the document in its file, counted from 1; 0: the file as a whole."""
    kind: str
    name: str
    outcome: DocumentOutcome
    findings: tuple[Finding, ...] = ()
    job: FineTuneJob | None = None
    """The parsed job; None if the document is not a job."""
    plan: RunPlan | None = None
    """Plan of an accepted job."""
    price_per_hour: str | None = None
    """Price of one device for an hour, from the profile."""
    file: str = ""

    @property
    def device(self) -> str:
        """The devices on which the ranks of an accepted job compute, in words."""
        return device_text(self.plan) if self.plan is not None else ""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Values chosen for fields that the manifest leaves unset, with the reasons."""
        return self.plan.choices if self.plan is not None else ()


@dataclass(frozen=True)
class Report:
    """The verdicts on all documents of all files."""

    verdicts: tuple[DocumentVerdict, ...]

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the worst verdict."""
        outcomes = {verdict.outcome for verdict in self.verdicts}
        if DocumentOutcome.UNUSABLE in outcomes:
            return ExitCode.UNUSABLE
        return ExitCode.REFUSED if DocumentOutcome.REFUSED in outcomes else ExitCode.DONE


def validate(manifest: str, profile: str | None = None) -> Report:
    """Judge every FineTuneJob in a manifest, with the given profile or else the one in the manifest that the job names."""
    return validate_files([("", manifest)], profile)


def validate_files(files: Sequence[tuple[str, str]], profile: str | None = None) -> Report:
    """Judge every FineTuneJob in files, given as pairs of name and text. A profile in one file applies to jobs in all files."""
    documents: list[Document] = []
    verdicts: list[DocumentVerdict] = []
    for name, text in files:
        try:
            documents += [item for document in read_documents(text, name) for item in objects_of(document)]
        except DocumentError as error:
            verdicts.append(_unusable(Document(0, None, name), (error.finding,)))
    profiles = Profiles()
    verdicts += [verdict for document in documents if (verdict := profiles.add(document)) is not None]
    if profile is not None:
        verdicts += profiles.take_only(profile)
    known_job = any(_kind(document.content) == JOB_KIND for document in documents)
    for document in documents:
        match _kind(document.content):
            case kind if kind == JOB_KIND:
                verdicts.append(_job_verdict(document, profiles))
            case kind if kind != PROFILE_KIND:
                verdicts.append(_other(document, known_job))
    order = {name: number for number, (name, _) in enumerate(files)}
    return Report(tuple(sorted(verdicts, key=lambda verdict: (order.get(verdict.file, -1), verdict.document))))


def judge(job: FineTuneJob, profile: FineTuneProfileSpec | None) -> tuple[DocumentOutcome, tuple[Finding, ...]]:
    """Judge a job by the rules."""
    foreign = foreign_trackers(job.spec.training.trackers or ())
    findings = (*evaluate(RuleContext(job.spec, profile, job.metadata.name)), *(() if foreign is None else (foreign,)))
    refused = any(finding.severity == "error" for finding in findings)
    return (DocumentOutcome.REFUSED if refused else DocumentOutcome.ACCEPTED), findings


def known_profiles(documents: Sequence[Document], profile: str | None) -> Profiles:
    """Return the profiles among the documents, or only the given one; profiles that do not parse are left out."""
    profiles = Profiles()
    for document in documents:
        for item in objects_of(document):
            profiles.add(item)
    if profile is not None:
        profiles.take_only(profile)
    return profiles


class Profiles:
    """Profiles by name."""

    def __init__(self) -> None:
        self._specs: dict[str, FineTuneProfileSpec] = {}
        self._only: FineTuneProfileSpec | None = None

    def add(self, document: Document) -> DocumentVerdict | None:
        """Add a profile, and return the verdict on it; None if the document is not a profile."""
        if _kind(document.content) != PROFILE_KIND:
            return None
        parsed = parse_profile(document.content)
        if isinstance(parsed, list):
            return _unusable(document, tuple(parsed))
        self._specs[parsed.metadata.name] = parsed.spec
        return DocumentVerdict(document.number, PROFILE_KIND, parsed.metadata.name, DocumentOutcome.ACCEPTED, file=document.file)

    def take_only(self, text: str) -> list[DocumentVerdict]:
        """Use the profile in `text` for every job. Return the verdicts on what is wrong with it."""
        try:
            documents = [item for document in read_documents(text) for item in objects_of(document)]
        except DocumentError as error:
            return [_unusable(Document(0, {"kind": PROFILE_KIND}), (error.finding,))]
        # The file may hold other objects, such as those that a chart renders; they are left out.
        named = [document for document in documents if _kind(document.content) == PROFILE_KIND] or documents
        if len(named) > 1:
            names = ", ".join(_name(document.content) or "unnamed" for document in named)
            finding = problem(
                "file", names, f"holds {len(named)} objects that could be the {PROFILE_KIND}", "give a file with one"
            )
            return [_unusable(Document(0, {"kind": PROFILE_KIND}), (finding,))]
        parsed = parse_profile(named[0].content)
        if isinstance(parsed, list):
            return [DocumentVerdict(0, PROFILE_KIND, _name(named[0].content), DocumentOutcome.UNUSABLE, tuple(parsed))]
        self._only = parsed.spec
        return []

    def of(self, job: FineTuneJob) -> FineTuneProfileSpec | None:
        """Return the profile of a job, or None if it is not known."""
        return self._only or self._specs.get(job.spec.profile or DEFAULT_PROFILE)


def _job_verdict(document: Document, profiles: Profiles) -> DocumentVerdict:
    job = parse_job(document.content)
    if isinstance(job, list):
        return _unusable(document, tuple(with_commits(finding, document.content) for finding in job))
    profile = profiles.of(job)
    outcome, judged = judge(job, profile)
    findings = tuple(with_commits(finding, document.content) for finding in judged)
    verdict = DocumentVerdict(document.number, JOB_KIND, job.metadata.name, outcome, findings, job, file=document.file)
    if outcome is DocumentOutcome.REFUSED:
        return verdict
    identity = JobIdentity(namespace=job.metadata.namespace, name=job.metadata.name, uid=job.metadata.uid)
    plan = resolve(identity, job.spec, profile)
    model = job.spec.model
    sizes = [size for name in (model.hub_name or "", model.source) if (size := parameters_by_name(name)) is not None]
    warning = large_on_cpu(plan, sizes[0] if sizes else None)
    price = None if profile is None or profile.gpu is None else profile.gpu.price_per_hour
    return replace(verdict, plan=plan, price_per_hour=price, findings=(*findings, *(() if warning is None else (warning,))))


def _other(document: Document, beside_a_job: bool) -> DocumentVerdict:
    """Judge a document that is neither a job nor a profile."""
    content = document.content
    is_object = isinstance(content, dict) and bool(content.get("apiVersion")) and bool(content.get("kind"))
    if beside_a_job and is_object and not str(content["apiVersion"]).startswith(f"{GROUP}/"):
        return DocumentVerdict(document.number, str(content["kind"]), _name(content), DocumentOutcome.SKIPPED, file=document.file)
    if not isinstance(content, dict):
        finding = problem(
            "document", str(content)[:60], "is not an object", f"start with apiVersion: {API_VERSION} and kind: {JOB_KIND}"
        )
    elif is_meant_as_job(content.get("kind")):
        finding = problem("kind", format_value(content["kind"]), f"is not {JOB_KIND}", f"write kind: {JOB_KIND}")
    elif content.get("kind") is None:
        finding = problem("kind", "unset", "is required", f"write kind: {JOB_KIND}")
    else:
        finding = problem("kind", format_value(content["kind"]), f"is not {JOB_KIND}", f"give a manifest of kind {JOB_KIND}")
    return _unusable(document, (finding,))


def _unusable(document: Document, findings: tuple[Finding, ...]) -> DocumentVerdict:
    content = document.content
    return DocumentVerdict(
        document.number, _kind(content), _name(content), DocumentOutcome.UNUSABLE, findings, file=document.file
    )


def _kind(content: Any) -> str:
    kind = content.get("kind") if isinstance(content, dict) else None
    return "" if kind is None else format_value(kind)


def _name(content: Any) -> str:
    metadata = content.get("metadata") if isinstance(content, dict) else None
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
