"""Files of lines: what crashes and full disks do to them."""

import errno
import os
from pathlib import Path

import pytest

from finetune_trainer import json_lines
from finetune_trainer.files import SpecialFileError
from finetune_trainer.json_lines import JsonLines, last_lines, read_lines


def test_lines_wait_for_a_full_disk_to_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    lines.append({"step": 1})
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if room:
            return write(descriptor, bytes(data)[: room.pop()])
        raise OSError(errno.ENOSPC, "No space left on device")

    room = [3]
    monkeypatch.setattr(os, "write", full)
    lines.append({"step": 2})
    lines.append({"step": 3})
    assert path.read_text() == '{"step": 1}\n'
    assert caplog.text.count("cannot be written") == 1
    monkeypatch.undo()
    lines.append({"step": 4})
    lines.close()
    assert [line["step"] for line in read_lines(path.read_text())] == [1, 2, 3, 4]


def test_a_line_cut_off_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"st')
    lines = JsonLines(path)
    lines.append({"step": 2})
    lines.close()
    assert read_lines(path.read_text()) == [{"step": 1}, {"step": 2}]


def test_the_last_lines_of_a_long_file_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"step": {1000 + number}}}\n' for number in range(100)))
    assert len(last_lines(path)) == 100
    monkeypatch.setattr(json_lines, "TAIL_BYTES", 50)
    assert last_lines(path) == [{"step": 1097}, {"step": 1098}, {"step": 1099}]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "lines.jsonl") == []


def test_lines_of_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lines.jsonl")
    with pytest.raises(SpecialFileError):
        last_lines(tmp_path / "lines.jsonl")
