"""A name holds what was there before or the whole of what is new, and only files are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finetune_trainer.files import (
    TEMPORARY_MARK,
    SpecialFileError,
    file_sha256,
    open_regular,
    publish_directory,
    temporary_beside,
    write_durably,
)

ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_write_replaces_the_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"a longer content of before")
    write_durably(path, b"abc")
    assert path.read_bytes() == b"abc"
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]
    assert file_sha256(path) == ABC_SHA256


def test_a_write_that_fails_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"before")

    def full(_descriptor: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_durably(path, b"after")
    assert path.read_bytes() == b"before"
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


def test_a_complete_directory_takes_its_final_name(tmp_path: Path) -> None:
    temporary = temporary_beside(tmp_path / "adapter")
    assert temporary.parent == tmp_path
    assert temporary.name.startswith(f"adapter{TEMPORARY_MARK}")
    temporary.mkdir()
    (temporary / "file").write_text("x")
    publish_directory(temporary, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "file").read_text() == "x"
    assert not temporary.exists()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_pipe, make_loop, Path.mkdir])
def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path, make) -> None:
    path = tmp_path / "weights"
    make(path)
    with pytest.raises(SpecialFileError, match="not a file"):
        open_regular(path)


def test_a_missing_file_is_the_file_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_sha256(tmp_path / "absent")
