"""The page of failure classes is the policy's."""

from pathlib import Path

from finetune_job.failures import FailureClass
from finetune_operator.decide.failures.table import page

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "failures.md"


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make generate`"


def test_every_class_has_a_row_with_its_evidence() -> None:
    rows = {line.split(" | ")[0].strip("| `"): line.split(" | ") for line in page().splitlines() if line.startswith("| `")}
    assert set(rows) == {str(failure) for failure in FailureClass}
    assert all(row[2] for row in rows.values())
    assert rows["NodeLost"][3:6] == ["not counted", "10 s", "after 50 in a row"]
    assert rows["DiskFull"][3:7] == ["counted", "60 s", "after `maxRestarts`", "yes"]
    assert rows["SourceUnavailable"][3:6] == ["not counted", "30 s", "after 24 h in a row"]
    assert rows["ImagePull"][4] == "10 s, longest 3600 s"
    assert rows["DeviceFault"][3:7] == ["not counted", "60 s", "after 5 in a row", "yes"]
    assert rows["NonFinite"][3:6] == ["no", "", "at once"]
