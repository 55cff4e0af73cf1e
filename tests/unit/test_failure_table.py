"""The table of failures on real nodes: how it is printed and kept, and that a difference is seen."""

from dataclasses import asdict, replace
from typing import cast

import pytest

from tests.e2e.failures import absences, node_faults, rank_faults
from tests.e2e.failures.case import Case, Expected, FailedAttempt, Outcome
from tests.e2e.failures.scene import Scene
from tests.e2e.failures.table import table, with_table
from tools.cluster.errors import ClusterError
from tools.stack import Stack

LOST = FailedAttempt("train", "NodeLost", counted=False)
EXPECTED = Expected("Succeeded", (LOST,), says="BlockedOnNode", resumes=True)
OUTCOME = Outcome("Succeeded", (LOST,), "BlockedOnNode", resumes=True, seconds=61.4, seconds_until_said=20.2)
CASE = Case("power-cut", "power of one node cut", EXPECTED, lambda scene: None)
PAGE = """# Results
<!-- The table below is written by `python -m tests.e2e.failures`. -->
old
<!-- End of the table. -->
after
"""


def test_what_is_expected_differs_in_nothing() -> None:
    assert OUTCOME.differences(EXPECTED) == []


@pytest.mark.parametrize(
    ("seen", "field"),
    [
        (replace(OUTCOME, final="Failed"), "final"),
        (replace(OUTCOME, failures=()), "failures"),
        (replace(OUTCOME, failures=(replace(LOST, counted=True),)), "failures"),
        (replace(OUTCOME, failures=(replace(LOST, failure="Unknown"),)), "failures"),
        (replace(OUTCOME, failures=(replace(LOST, role="merge"),)), "failures"),
        (replace(OUTCOME, says="Restarting"), "says"),
        (replace(OUTCOME, resumes=False), "resumes"),
    ],
)
def test_each_difference_is_named(seen: Outcome, field: str) -> None:
    (difference,) = seen.differences(EXPECTED)
    assert difference.startswith(f"{field}: expected ")


def test_a_row_says_class_counter_state_and_seconds() -> None:
    *_, row = table({"power-cut": OUTCOME}, [CASE]).splitlines()
    assert row == "| power-cut | power of one node cut | NodeLost | no | BlockedOnNode after 20 s | Succeeded | 61 s |"


def test_a_row_of_a_case_that_somebody_fixes_counts_from_the_fix() -> None:
    outcome = Outcome("Succeeded", (), "MountFailed", resumes=False, seconds=9.6, seconds_until_said=4.0)
    *_, row = table({"power-cut": outcome}, [replace(CASE, fixed=True)]).splitlines()
    assert row.endswith("| none |  | MountFailed after 4 s | Succeeded | 10 s after the fix |")


def test_a_row_of_a_job_that_trains_no_more_says_so() -> None:
    outcome = Outcome("Failed", (FailedAttempt("train", "HostOutOfMemory", counted=False),), "", resumes=False, seconds=None)
    *_, row = table({"power-cut": outcome}, [CASE]).splitlines()
    assert row.endswith("| HostOutOfMemory | no |  | Failed | none |")


def test_only_the_table_of_the_page_is_replaced() -> None:
    lines = with_table(PAGE, "new").splitlines()
    assert lines[0] == "# Results"
    assert lines[-1] == "after"
    assert "old" not in lines
    assert "new" in lines
    assert with_table(with_table(PAGE, "x"), "new").splitlines() == lines


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table"):
        with_table("# Results\n", "new")


def test_an_outcome_survives_being_kept() -> None:
    assert Outcome.from_record(asdict(OUTCOME)) == OUTCOME


def test_nobody_waits_for_the_word_of_a_job_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"conditions": [{"type": "Finished", "status": "True", "reason": "Completed"}]}
    monkeypatch.setattr(Scene, "status", lambda _: ended)
    with pytest.raises(ClusterError, match="has ended and never said MountFailed"):
        Scene(cast("Stack", None), "volume-missing").wait_until_said("MountFailed")


def test_the_cases_have_names_of_their_own_and_those_that_are_fixed_say_what_was_wrong() -> None:
    cases = (*rank_faults.CASES, *node_faults.CASES, *absences.CASES)
    assert len({case.name for case in cases}) == len(cases)
    assert len(cases) >= 17
    assert all(case.expected.final in {"Succeeded", "Failed", "Stalled"} for case in cases)
