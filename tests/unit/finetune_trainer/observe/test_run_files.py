"""Files of lines: what crashes and full disks do to them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from finetune_trainer.observe.run_files import History, JsonLines, kept_lines, read_lines


def test_history_keeps_lines_up_to_the_resumed_step() -> None:
    text = '{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\nnoise\n[]\n{"ste'
    assert kept_lines(text, 2) == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert kept_lines(text, 0) == [{"step": 0}]


def test_a_resumed_history_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    first = History(path, None)
    for step in range(6):
        first.append(step=step, tokens=10, mfu=None)
    path.write_text(path.read_text()[:-4])
    resumed = History(path, 3)
    assert resumed.tokens == 40
    for step in range(4, 7):
        resumed.append(step=step, tokens=10)
    resumed.close()
    assert [line["step"] for line in read_lines(path.read_text())] == list(range(7))
    assert "mfu" not in path.read_text()
    assert resumed.tokens == 70


def test_a_run_from_the_start_has_no_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1}\n')
    History(path, None).append(step=1, tokens=1)
    assert path.read_text() == '{"step": 1, "tokens": 1}\n'


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
