"""No manifest, however hostile, ends in anything but a verdict that a person can act on, in bounded time and memory.

Objects as clients send them, and texts as people hand them to the command line. `HOSTILE_SEED` and
`HOSTILE_MANIFESTS` repeat and extend a run; both are printed where it fails.
"""

import json
import os
import resource
import time
from collections import Counter
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_cli.checks.fix import fix
from finetune_cli.checks.validate import DocumentOutcome, validate
from finetune_cli.documents import DocumentError, read_documents
from finetune_cli.manifest import parse_job as parse_strictly
from finetune_cli.manifest import parse_profile
from finetune_cli.render.verdicts import as_json, report_document, report_text
from finetune_job.api.job import FineTuneJobSpec, parse_job
from finetune_job.api.profile import FineTuneProfileSpec, GpuResource
from finetune_job.finding import Finding
from finetune_job.names import API_VERSION, JOB_KIND
from finetune_job.plan.digest import canonical_json
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext, with_changes
from finetune_operator.decide.stages.validate_stage import status_findings
from tests.hostile.manifests import PLAIN, job_of, profile_of, text_of
from tests.support.source_seed import seed_of_the_sources

SEED = int(os.environ.get("HOSTILE_SEED", seed_of_the_sources()))
MANIFESTS = int(os.environ.get("HOSTILE_MANIFESTS", "16000"))
NOT_CERTAIN = {"hub-source-without-revision"}
"""Errors that `--fix` leaves to a person: which commit, only the author knows."""
OBJECTS, TEXTS = MANIFESTS * 70 // 100, MANIFESTS * 30 // 100
LONGEST_SECONDS = 10.0
"""CPU time of one manifest; the slowest takes a tenth of a second on an idle machine."""
MOST_MEMORY_BYTES = 400 * 2**20
"""By which the process may grow."""
PROFILES = (None, FineTuneProfileSpec(trainer_image="trainer"), FineTuneProfileSpec(trainer_image="trainer", gpu=GpuResource()))
IDENTITY = JobIdentity(namespace="team", name="tried", uid="0123")


@pytest.fixture(autouse=True)
def _repeatable(record_property: Any) -> None:
    record_property("HOSTILE_SEED", SEED)
    print(f"HOSTILE_SEED={SEED} HOSTILE_MANIFESTS={MANIFESTS}")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Bounded:
    """Time and memory of what is done inside."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._start = time.process_time()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        taken = time.process_time() - self._start
        if error is not None:
            error.add_note(f"HOSTILE_SEED={SEED}: {self._what!r:.3000}")
        else:
            assert taken < LONGEST_SECONDS, f"{taken:.1f} s for {self._what!r:.2000}"


def assert_helpful(findings: list[Finding]) -> None:
    assert findings
    for finding in findings:
        assert finding.rule, finding
        assert finding.field, finding
        assert finding.message, finding
        assert finding.fix, finding


def judged(spec: FineTuneJobSpec, profile: FineTuneProfileSpec | None) -> bool:
    """Whether the rules accept a job; and everything that is done with one before a pod."""
    findings = evaluate(RuleContext(spec, profile))
    assert len(status_findings(findings)) <= len(findings)
    if findings:
        assert_helpful(list(findings))
    plan = resolve(IDENTITY, spec, profile)
    text = canonical_json(plan)
    assert canonical_json(RunPlan.model_validate_json(text)) == text
    return not any(finding.severity == "error" for finding in findings)


def test_objects_are_refused_with_reasons_or_accepted_and_planned() -> None:
    random, outcomes = Random(SEED), Counter[str]()
    before = peak_bytes()
    for number in range(OBJECTS):
        document = job_of(random)
        with Bounded(document):
            outcomes[one_object(document, PROFILES[number % 3], is_fixed=number % 20 == 0)] += 1
    assert peak_bytes() - before < MOST_MEMORY_BYTES
    # A generator that makes only rubbish, or only what is fine, would test nothing.
    assert min(outcomes[kind] for kind in ("unreadable", "refused", "accepted")) > OBJECTS / 20, outcomes


def one_object(document: dict[str, Any], profile: FineTuneProfileSpec | None, *, is_fixed: bool) -> str:
    try:
        leniently = parse_job(document)
    except ValidationError:
        leniently = None
    try:
        strictly = parse_strictly(document)
    except (ValueError, RecursionError):
        # What is no JSON never comes to a parser: the command line's reader refuses it first.
        with pytest.raises((DocumentError, ValueError)):
            read_documents(json.dumps(document, allow_nan=False))
        return "no JSON"
    if isinstance(strictly, list):
        assert_helpful(strictly)
        if leniently is not None:
            judged(leniently.spec, profile)
        return "unreadable"
    assert leniently is not None
    assert leniently.spec == strictly.spec
    accepted = judged(strictly.spec, profile)
    if is_fixed:
        fixed(document, profile)
    return "accepted" if accepted else "refused"


def fixed(document: dict[str, Any], profile: FineTuneProfileSpec | None) -> None:
    """Fix after fix leads to a job that every rule accepts without a word."""
    for _ in range(100):
        job = parse_strictly(document)
        assert not isinstance(job, list), job
        found = evaluate(RuleContext(job.spec, profile))
        if not found:
            return
        assert found[0].changes, found[0]
        document = with_changes(document, found[0].changes)
    raise AssertionError(f"the fixes go in circles: {found}")


def test_profiles_are_refused_with_reasons_or_judged_with() -> None:
    random, outcomes = Random(SEED + 2), Counter[str]()
    plain = parse_job({"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": "tried"}, "spec": PLAIN})
    for _ in range(MANIFESTS // 20):
        document = profile_of(random)
        with Bounded(document):
            try:
                parsed = parse_profile(document)
            except (ValueError, RecursionError):
                with pytest.raises((DocumentError, ValueError)):
                    read_documents(json.dumps(document, allow_nan=False))
                continue
            outcomes[type(parsed).__name__] += 1
            if isinstance(parsed, list):
                assert_helpful(parsed)
            else:
                judged(plain.spec, parsed.spec)
    assert min(outcomes[kind] for kind in ("list", "FineTuneProfile")) > MANIFESTS / 1000, outcomes


def test_texts_end_in_a_verdict() -> None:
    random, outcomes = Random(SEED + 1), Counter[DocumentOutcome]()
    before = peak_bytes()
    for number in range(TEXTS):
        text = text_of(random)
        with Bounded(text):
            report = validate(text)
            assert report.verdicts
            for verdict in report.verdicts:
                outcomes[verdict.outcome] += 1
                if verdict.outcome in (DocumentOutcome.UNUSABLE, DocumentOutcome.REFUSED):
                    assert_helpful(list(verdict.findings))
            report_text(report).encode()
            as_json(report_document(report)).encode()
            if number % 10 == 0:
                fixed = fix([("", text)])[0].text
                after = validate(fixed)
                left = {each.rule for verdict in after.verdicts if verdict.outcome is DocumentOutcome.REFUSED
                        for each in verdict.findings if each.severity == "error"}  # fmt: skip
                assert left <= NOT_CERTAIN, left
                assert DocumentOutcome.UNUSABLE not in {each.outcome for each in after.verdicts} - {
                    each.outcome for each in report.verdicts
                }
    assert peak_bytes() - before < MOST_MEMORY_BYTES
    assert (
        min(outcomes[kind] for kind in (DocumentOutcome.ACCEPTED, DocumentOutcome.REFUSED, DocumentOutcome.UNUSABLE)) > TEXTS / 30
    ), outcomes
