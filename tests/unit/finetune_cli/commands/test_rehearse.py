"""What `finetune rehearse` prints of a rehearsal, and the exit code that follows from it."""

from typing import Any

import pytest
from rich.console import Console

from finetune_cli.commands.rehearse import _RehearsalPrinter, rehearsal_text, stage_text
from finetune_cli.exit_codes import ExitCode

WARNING = {
    "rule": "memory-tight",
    "severity": "warning",
    "field": "spec.training",
    "value": "8",
    "message": "close",
    "fix": "lower it",
}


def report(verdict: str, **given: Any) -> dict[str, Any]:
    cost = {"seconds": 12.34, "peak_memory_bytes": 300 << 20, "parameters": 4096}
    return {"verdict": verdict, "findings": [], "changes": [], **cost, **given}


def printer() -> tuple[_RehearsalPrinter, Console]:
    console = Console(record=True, width=200, quiet=True)
    return _RehearsalPrinter(console, "tune"), console


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("Passed", ExitCode.DONE), ("NotDone", ExitCode.FAILED), ("Failed", ExitCode.REFUSED), ("Unheard", ExitCode.REFUSED)],
)
def test_only_a_passed_rehearsal_ends_well(verdict: str, code: ExitCode) -> None:
    heard, _ = printer()
    heard.take({"report": report(verdict)})
    assert heard.exit_code is code


def test_a_process_that_gave_no_report_has_not_passed() -> None:
    heard, _ = printer()
    heard.take({"stage": {"stage": "build", "seconds": 1.0, "problem": ""}})
    heard.take({"shown": "something else"})
    assert heard.exit_code is ExitCode.REFUSED


def test_findings_are_printed_as_they_come_and_those_of_the_report() -> None:
    heard, console = printer()
    console.quiet = False
    heard.take({"finding": WARNING | {"rule": "first-rule"}})
    heard.take({"report": report("Failed", findings=[WARNING])})
    text = console.export_text()
    assert text.index("first-rule") < text.index("memory-tight") < text.index("tune: the rehearsal failed")


def test_a_stage_names_the_first_line_of_its_problem() -> None:
    wrong = {"stage": "train", "seconds": 3.21, "problem": "no gradient\nTraceback"}
    assert stage_text(wrong) == "  train      3.2 s  wrong: no gradient"
    assert stage_text({"stage": "merge", "seconds": 0.5, "problem": ""}) == "  merge      0.5 s  right"


def test_the_text_says_what_it_cost_and_what_was_changed() -> None:
    text = rehearsal_text("tune", report("Passed", changes=["layers 32 -> 2"]))
    assert "passed: every stage succeeded on a scaled-down model (12.3 s, 300 MiB, 4096 parameters)" in text
    assert text.endswith("  Changed for the rehearsal:\n    layers 32 -> 2")
