"""What is believed of the lines that a process of the trainer writes."""

import io
import sys
from pathlib import Path

import pytest

from finetune_cli.local import programs
from finetune_cli.local.launch import Interruption
from finetune_cli.local.programs import json_lines, run_rehearsal
from tests.support.builders import a_job
from tests.support.cases import table


def test_only_whole_objects_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "LONGEST_LINE_BYTES", 16)
    written = b'{"a": 1}\n' + b"Loading: 3%\n[1]\n\n" + b'{"long": "xxxxxxxxxxx"}\n' + b'{"b": 2}\n' + b'{"cut": 1'
    assert list(json_lines(io.BytesIO(written))) == [{"a": 1}, {"b": 2}]


def test_the_end_of_a_line_that_is_too_long_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "LONGEST_LINE_BYTES", 16)
    assert list(json_lines(io.BytesIO(b"x" * 32 + b'{"report": 1}\n'))) == []


def test_a_process_without_output_says_nothing() -> None:
    assert list(json_lines(None)) == []


@pytest.mark.parametrize(("program", "status", "said", "logged"), table(__file__, "test_what_a_rehearsal_prints_and_how_it_ends"))
def test_what_a_rehearsal_prints_and_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, status: int, said: list[object], logged: str
) -> None:
    monkeypatch.setattr(programs, "trainer_command", lambda *_: [sys.executable, "-c", program])
    lines: list[object] = []
    with Interruption() as interruption:
        assert run_rehearsal(a_job().plan(), [], tmp_path / "log", interruption, lines.append) == status
    assert lines == said
    assert (tmp_path / "log").read_text() == logged
