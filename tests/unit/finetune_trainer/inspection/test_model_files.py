"""A model's directory whose files cannot be chosen or listed."""

import os
from pathlib import Path

import pytest

from finetune_trainer.inspection.model_files import inspect_model_files

INDEX = "model.safetensors.index.json"


def test_one_file_and_an_index_together_are_refused(model: Path) -> None:
    assert (model / INDEX).exists()
    (model / "model.safetensors").write_bytes(b"")
    (finding,) = inspect_model_files(model, "pvc://models/tiny").findings
    assert (finding.rule, finding.severity, finding.value) == ("model-weights-ambiguous", "error", "pvc://models/tiny")
    (model / "model.safetensors").unlink()
    assert inspect_model_files(model, "pvc://models/tiny").findings == ()


def test_a_directory_that_cannot_be_listed_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may list every directory, so the refusal of the file system is played.
    def refused(path: Path) -> list[Path]:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    (finding,) = inspect_model_files(model, "pvc://models/tiny").findings
    assert (finding.rule, finding.severity) == ("model-directory-unreadable", "error")
    assert "Permission denied" in finding.message
