"""The termination report fits what the kubelet keeps, whatever it holds."""

import string

from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_job.failures import (
    CLASS_OF_EXIT_CODE,
    EXIT_CODES,
    TERMINATION_LIMIT_BYTES,
    FailureClass,
    Outcome,
    TerminationReport,
    parse_envelope,
)
from finetune_job.finding import Finding

texts = st.builds(lambda text, times: text * times, st.text(max_size=8), st.sampled_from([0, 1, 5, 300, 1500]))
findings = st.builds(
    Finding, rule=texts, severity=st.sampled_from(["error", "warning"]), field=texts, value=texts, message=texts, fix=texts
)
reports = st.builds(
    TerminationReport,
    role=st.text(alphabet=string.ascii_lowercase, max_size=10),
    outcome=st.sampled_from(Outcome),
    failure=st.one_of(st.none(), st.sampled_from(FailureClass)),
    message=texts,
    hint=texts,
    exception=texts,
    findings=st.lists(findings, max_size=8),
    facts=st.dictionaries(texts, texts, max_size=8),
    report_path=texts,
)


@given(reports)
@settings(max_examples=60, deadline=None)
def test_every_envelope_fits_and_reads_back(report: TerminationReport) -> None:
    envelope = report.envelope()
    assert len(envelope.encode()) <= TERMINATION_LIMIT_BYTES
    back = parse_envelope(envelope)
    assert back is not None
    assert (back.outcome, back.failure) == (report.outcome, report.failure)
    assert max(back.findings_total, len(back.findings)) == len(report.findings)


def test_a_short_report_is_kept_whole() -> None:
    report = TerminationReport(
        role="train",
        attempt=3,
        outcome=Outcome.FAILED,
        failure=FailureClass.NON_FINITE,
        message="loss is nan",
        hint="lower",
        rank=5,
        step=7,
    )
    assert parse_envelope(report.envelope()) == report


def test_what_is_not_a_report_is_none() -> None:
    assert parse_envelope("") is None
    assert parse_envelope("Traceback (most recent call last)") is None
    assert parse_envelope('{"role": 1}') is None


def test_exit_codes_are_distinct_and_clear_of_the_shells() -> None:
    assert len(CLASS_OF_EXIT_CODE) == len(EXIT_CODES)
    assert all(3 <= code < 64 for code in EXIT_CODES.values())
    assert set(FailureClass) - set(EXIT_CODES) == {
        FailureClass.INFRASTRUCTURE,
        FailureClass.NODE_LOST,
        FailureClass.REJECTED,
        FailureClass.IMAGE_PULL,
        FailureClass.MOUNT,
        FailureClass.ADMISSION,
        FailureClass.UNKNOWN,
    }
