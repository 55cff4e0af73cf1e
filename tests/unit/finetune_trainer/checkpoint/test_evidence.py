"""What records of a run are taken for, and that nothing written into them does harm."""

import os
from pathlib import Path

import pytest

from finetune_job.layout import WorkspaceLayout
from finetune_trainer.checkpoint.evidence import Evidence, recorded_progress
from finetune_trainer.files import SpecialFileError


@pytest.fixture
def workspace(tmp_path: Path) -> WorkspaceLayout:
    layout = WorkspaceLayout(tmp_path)
    layout.checkpoints.mkdir()
    return layout


def test_the_latest_step_of_all_records_counts(workspace: WorkspaceLayout) -> None:
    assert recorded_progress(workspace) is None
    workspace.history.write_text('{"step": 9, "checkpoint_step": 8}\n{"step": 3, "checkpoint_step": 2}\n')
    assert recorded_progress(workspace) == Evidence(8, workspace.history)
    (workspace.checkpoints / "latest").write_text("step-0000000006\n")
    assert recorded_progress(workspace) == Evidence(8, workspace.history)
    workspace.accounts.write_text('{"kind": "started", "step": 10}\n{"kind": "spent", "step": 99}\n')
    assert recorded_progress(workspace) == Evidence(10, workspace.accounts)


@pytest.mark.parametrize("text", ["", "step-6", "\0" * 500, "step-0000000006" * 100, "../step-0000000006"])
def test_a_file_that_names_no_checkpoint_says_nothing(workspace: WorkspaceLayout, text: str) -> None:
    (workspace.checkpoints / "latest").write_text(text)
    assert recorded_progress(workspace) is None


@pytest.mark.parametrize("value", ["null", '"8"', "8.0", "-8", "[8]", "{}", "NaN", "true"])
def test_a_line_without_a_step_says_nothing(workspace: WorkspaceLayout, value: str) -> None:
    workspace.history.write_text(f'{{"checkpoint_step": {value}}}\n' + "[" * 100_000 + "\n")
    assert recorded_progress(workspace) is None


def test_a_pipe_is_not_waited_for(workspace: WorkspaceLayout) -> None:
    os.mkfifo(workspace.history)
    with pytest.raises(SpecialFileError):
        recorded_progress(workspace)
