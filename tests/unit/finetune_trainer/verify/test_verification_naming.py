"""The end of a merge: a model that passes takes its final name, one that fails is kept under another, and nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from finetune_job.api.enumerations import MergeBase
from finetune_job.failures import FailureClass
from finetune_job.layout import MergedPaths, OutputLayout
from finetune_trainer.errors import VerificationError, classify
from finetune_trainer.verify import verification as naming
from finetune_trainer.verify.gate import GATES


class Verdict:
    """What a verification found."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def text(self) -> str:
        return "passed" if self.passed else "FAILED: q_proj"


def named(
    paths: MergedPaths, monkeypatch: pytest.MonkeyPatch, *, passed: bool, events: list[str] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The report, and what the verification was asked."""
    asked: dict[str, Any] = {}

    def verify_merge(**arguments: Any) -> Verdict:
        asked.update(arguments)
        arguments["report_path"].write_text("{}")
        return Verdict(passed)

    monkeypatch.setattr(naming, "verify_merge", verify_merge)
    report = naming.verify_and_name(
        paths,
        base=Path("base"),
        adapters=[Path("adapter")],
        prompts=[[1, 2]],
        gate=GATES["float16"],
        quantization=None,
        merged_onto=MergeBase.ORIGINAL,
        base_sha256={"model.safetensors": "of the training"},
        allow_remote_code=True,
        withdraw=lambda failed: (events if events is not None else []).append(
            f"withdrawn, passed {failed.passed}, while at {paths.current.name}"
        ),
    )
    return report, asked


def model(directory: Path, content: str = "weights") -> None:
    directory.mkdir()
    (directory / "model.safetensors").write_text(content)


def test_the_names_are_those_of_the_output_claim(tmp_path: Path) -> None:
    output = OutputLayout(tmp_path)
    paths = output.merged_paths()
    assert [path.name for path in (paths.verified, paths.unverified, paths.quarantined, paths.report, paths.page)] == [
        "merged",
        "merged.unverified",
        "merged.quarantined",
        "verification.json",
        "verification.md",
    ]
    elsewhere = output.merged_paths(tmp_path / "workspace")
    assert elsewhere.report == tmp_path / "workspace" / "verification.json"
    assert elsewhere.verified == tmp_path / "merged"


def test_a_model_that_passes_takes_its_name_and_the_verification_is_told_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = OutputLayout(tmp_path).merged_paths()
    model(paths.unverified)
    report, asked = named(paths, monkeypatch, passed=True)
    assert report.passed
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "verification.json"}
    assert asked["merged"] == tmp_path / "merged.unverified"
    assert asked["base_sha256"] == {"model.safetensors": "of the training"}
    assert asked["allow_remote_code"] is True
    assert asked["gate"] is GATES["float16"]


def test_a_model_that_has_its_name_already_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = OutputLayout(tmp_path).merged_paths()
    model(paths.verified)
    _, asked = named(paths, monkeypatch, passed=True)
    assert asked["merged"] == paths.verified
    assert paths.verified.is_dir()


@pytest.mark.parametrize("name", ["merged.unverified", "merged"])
def test_a_model_that_fails_is_withdrawn_and_then_quarantined(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = OutputLayout(tmp_path).merged_paths()
    for number, kept in ((1, "merged.quarantined"), (2, "merged.quarantined-2")):
        model(tmp_path / name, f"weights {number}")
        events: list[str] = []
        with pytest.raises(VerificationError, match="FAILED: q_proj") as caught:
            named(paths, monkeypatch, passed=False, events=events)
        assert events == [f"withdrawn, passed False, while at {name}"]
        assert f"kept as {kept}" in str(caught.value)
        assert classify(caught.value) == (
            FailureClass.VERIFICATION_FAILED,
            "see verification.md in the same directory; the adapter itself is whole",
        )
        assert not (tmp_path / name).exists()
        assert (tmp_path / kept / "model.safetensors").read_text() == f"weights {number}"
    assert (tmp_path / "merged.quarantined" / "model.safetensors").read_text() == "weights 1"
