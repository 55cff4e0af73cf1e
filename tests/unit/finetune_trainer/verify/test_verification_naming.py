"""The end of a merge: a model that passes takes its final name, one that fails is kept under another, and nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from finetune_job.failures import FailureClass
from finetune_job.layout import MergedPaths, OutputLayout
from finetune_trainer.errors import VerificationError, classify
from finetune_trainer.verify.verification import verify_and_name


class Verdict:
    """What a verification found."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def text(self) -> str:
        return "passed" if self.passed else "FAILED: q_proj"


def named(paths: MergedPaths, *, passed: bool, events: list[str]) -> None:
    """Verify and name a model. events: get what was verified and what was withdrawn."""

    def verify(*, merged: Path, report_path: Path, page_path: Path) -> Any:
        assert (report_path, page_path) == (paths.report, paths.page)
        events.append(f"verified {merged.name}")
        report_path.write_text("{}")
        return Verdict(passed)

    def withdraw(failed: Any) -> None:
        events.append(f"withdrawn, passed {failed.passed}, while at {paths.current.name}")

    assert verify_and_name(paths, verify, withdraw).passed is passed


def model(directory: Path, content: str = "weights") -> None:
    directory.mkdir()
    (directory / "model.safetensors").write_text(content)


@pytest.mark.parametrize("name", ["merged.unverified", "merged"])
def test_a_model_that_passes_takes_or_keeps_its_name(name: str, tmp_path: Path) -> None:
    paths = OutputLayout(tmp_path).merged_paths()
    events: list[str] = []
    model(tmp_path / name)
    named(paths, passed=True, events=events)
    assert events == [f"verified {name}"]
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "verification.json"}


@pytest.mark.parametrize("name", ["merged.unverified", "merged"])
def test_a_model_that_fails_is_withdrawn_and_then_quarantined(name: str, tmp_path: Path) -> None:
    paths = OutputLayout(tmp_path).merged_paths()
    for number, kept in ((1, "merged.quarantined"), (2, "merged.quarantined-2")):
        model(tmp_path / name, f"weights {number}")
        events: list[str] = []
        with pytest.raises(VerificationError, match="FAILED: q_proj") as caught:
            named(paths, passed=False, events=events)
        assert events == [f"verified {name}", f"withdrawn, passed False, while at {name}"]
        assert f"kept as {kept}" in str(caught.value)
        assert classify(caught.value) == (
            FailureClass.VERIFICATION_FAILED,
            "see verification.md in the same directory; the adapter itself is whole",
        )
        assert not (tmp_path / name).exists()
        assert (tmp_path / kept / "model.safetensors").read_text() == f"weights {number}"
    assert (tmp_path / "merged.quarantined" / "model.safetensors").read_text() == "weights 1"
