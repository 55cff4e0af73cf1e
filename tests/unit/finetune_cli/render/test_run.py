"""What a local run says of its roles, and its last words."""

from io import StringIO

import pytest
from rich.console import Console

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.summary import Summary
from finetune_cli.render.run import LiveView, summary_text
from finetune_job.failures import FailureClass, Outcome, TerminationReport


def test_an_interrupted_run_says_how_to_continue():
    text = summary_text(ExitCode.INTERRUPTED, Summary(losses=None, step=7, adapter=None, merged=None, verification=None))
    assert "Run the same command again to continue" in text
    assert "last step:     7" in text


@pytest.mark.parametrize(
    ("facts", "said"), [({"rehearsal": "NotDone"}, "after 2.0 s: 3 steps; rehearsal: NotDone\n"), ({}, "after 2.0 s: 3 steps\n")]
)
def test_how_the_rehearsal_went_is_said(facts, said):
    shown = StringIO()
    report = TerminationReport(role="preflight", outcome=Outcome.SUCCEEDED, message="3 steps", facts=facts)
    LiveView(Console(file=shown), "tune").ended(report, 2.0)
    assert shown.getvalue() == f"tune: preflight succeeded {said}"


@pytest.mark.parametrize("role", ["fetch", "preflight", "train", "merge", "publish"])
@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (FailureClass.PREEMPTED, "interrupted after 2.0 s: ended at your request\n"),
        (FailureClass.INTERNAL, "failed (Internal) after 2.0 s: ended at your request\n"),
    ],
)
def test_an_interruption_is_not_called_a_failure_in_any_stage(role, failure, said):
    shown = StringIO()
    report = TerminationReport(role=role, outcome=Outcome.FAILED, failure=failure, message="ended at your request")
    LiveView(Console(file=shown), "tune").ended(report, 2.0)
    assert shown.getvalue() == f"tune: {role} {said}"
