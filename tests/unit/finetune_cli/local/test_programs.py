"""What is believed of the lines that a process of the trainer writes."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from finetune_cli.local import programs
from finetune_cli.local.launch import Interruption
from finetune_cli.local.programs import RehearsalOrder, json_lines, run_rehearsal
from tests.support.builders import a_job


def test_only_whole_objects_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "LONGEST_LINE_BYTES", 16)
    written = b'{"a": 1}\n' + b"Loading: 3%\n[1]\n\n" + b'{"long": "xxxxxxxxxxx"}\n' + b'{"b": 2}\n' + b'{"cut": 1'
    assert list(json_lines(io.BytesIO(written))) == [{"a": 1}, {"b": 2}]


def test_the_end_of_a_line_that_is_too_long_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "LONGEST_LINE_BYTES", 16)
    assert list(json_lines(io.BytesIO(b"x" * 32 + b'{"report": 1}\n'))) == []


def test_a_process_without_output_says_nothing() -> None:
    assert list(json_lines(None)) == []


class _Order(RehearsalOrder):
    program = ""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program]


def _run(order: _Order) -> tuple[int, list[object]]:
    said: list[object] = []
    with Interruption() as interruption:
        return run_rehearsal(order, interruption, said.append), said


def test_a_rehearsal_that_ends_before_it_reads_its_plan_ends_with_its_status(tmp_path: Path) -> None:
    order = _Order(a_job().plan(), tmp_path, tmp_path, tmp_path / "log", 1.0)
    object.__setattr__(order, "program", "import os, sys; os.close(0); sys.stderr.write('no torch'); sys.exit(41)")
    assert _run(order) == (41, [])
    assert order.log.read_text() == "no torch"


def test_lines_of_libraries_do_not_end_a_rehearsal(tmp_path: Path) -> None:
    order = _Order(a_job().plan(), tmp_path, tmp_path, tmp_path / "log", 1.0)
    object.__setattr__(order, "program", "import sys; sys.stdin.read(); print('Loading...'); print('{\"stage\": \"train\"}')")
    assert _run(order) == (0, [{"stage": "train"}])
