"""Names on the workspace and at the destination, which survive upgrades and which users find."""

from __future__ import annotations

from pathlib import Path

from finetune_job.layout import OutputLayout, WorkspaceLayout, checkpoint_name, checkpoint_step


def test_names_on_the_workspace() -> None:
    layout = WorkspaceLayout(Path("/claims/workspace/run"))
    assert layout.checkpoints == Path("/claims/workspace/run/checkpoints")
    assert layout.adapter == Path("/claims/workspace/run/trained")
    assert layout.model_report == Path("/claims/workspace/run/preflight.json")
    assert layout.reports("merge", 2) == Path("/claims/workspace/run/reports/merge-2")
    assert layout.rank_zero == Path("/claims/workspace/run/observe.json")
    assert layout.stacks(1) == Path("/claims/workspace/run/stacks/train-1")


def test_names_of_checkpoints() -> None:
    assert checkpoint_name(100) == "step-0000000100"
    assert checkpoint_step("step-0000000100") == 100
    assert [checkpoint_step(name) for name in ("step-100", "step-0000000100.tmp-1", "latest", "step-00000000100")] == [None] * 4


def test_names_at_the_destination() -> None:
    layout = OutputLayout(Path("/out"))
    assert (layout.adapter.name, layout.merged.name, layout.model_card.name) == ("adapter", "merged", "README.md")
    assert (layout.provenance.name, layout.checksums.name) == ("provenance.json", "SHA256SUMS")


def test_only_a_verified_model_has_the_name_of_a_result(tmp_path: Path) -> None:
    paths = OutputLayout(tmp_path).merged_paths()
    assert paths.current == tmp_path / "merged.unverified"
    assert paths.quarantined == tmp_path / "merged.quarantined"
    paths.verified.mkdir()
    assert paths.current == tmp_path / "merged"


def test_reports_may_be_in_another_directory_than_the_model() -> None:
    paths = OutputLayout(Path("/out")).merged_paths(reports=Path("/reports"))
    assert (paths.verified, paths.report, paths.page) == (
        Path("/out/merged"),
        Path("/reports/verification.json"),
        Path("/reports/verification.md"),
    )
