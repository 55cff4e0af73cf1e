"""A command that waits gives signs of life, in a file too, and says at once what it waits for."""

import logging
import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from finetune_cli.commands.merge import MergeView
from finetune_cli.commands.rehearse import _RehearsalPrinter
from finetune_cli.local.role_output import RoleOutput, SaidLine
from finetune_cli.render.run import LiveView
from finetune_cli.render.signs_of_life import SignsOfLife
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.names import Role
from finetune_job.progress import Progress
from finetune_trainer.__main__ import LOG_FORMAT
from finetune_trainer.fetch.source import source_unavailable
from finetune_trainer.network.retry import Retries, RetryPolicy, TransientError

SILENCE = 0.05


def waited_for(shown: StringIO, text: str) -> str:
    """What is shown once it holds the text."""
    deadline = time.monotonic() + 120
    while text not in shown.getvalue():
        assert time.monotonic() < deadline, shown.getvalue()
        time.sleep(0.01)
    return shown.getvalue()


def test_a_line_comes_only_after_silence_and_only_while_something_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    beat = SignsOfLife(lines.append, silence_seconds=30)
    start = time.monotonic()
    beat.doing("reading")
    text, pause = beat._next(start + 29)
    assert (text, 0 < pause < 2) == ("", True)
    beat.detail("3 of 4 files")
    text, pause = beat._next(start + 31)
    assert (text, pause) == ("still reading, for 31 s: 3 of 4 files", 30)
    assert beat._next(start + 40)[0] == "", "the line that was printed is a sign of life, too"
    assert beat._next(start + 62)[0] == "still reading, for 62 s: 3 of 4 files"
    beat.doing("")
    assert beat._next(time.monotonic() + 100)[0] == ""


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with SignsOfLife(lambda _: None):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_run_in_a_file_says_what_it_does_and_how_far_it_is() -> None:
    shown = StringIO()
    with LiveView(Console(file=shown, width=200), "tune", silence_seconds=SILENCE) as view:
        view.started(Role.FETCH, 0, Path("fetch-0.log"))
        waited_for(shown, "tune: still fetching model and data, for 0 s\n")
        view.said(SaidLine("model: asking hf://org/name which files there are"))
        waited_for(shown, "still fetching model and data, for 0 s: model: asking hf://org/name which files there are\n")
        view.ended(TerminationReport(role="fetch", outcome=Outcome.SUCCEEDED), 1.0)
        view.started(Role.TRAIN, 0, Path("train-0.log"))
        view.progressed(Progress(attempt=0, step=3, total_steps=10, loss=2.5))
        waited_for(shown, "tune: still training, for 0 s: step 3 of 10  loss 2.500\n")
        view.restarting(TerminationReport(role="train", outcome=Outcome.FAILED), 40.0)
        waited_for(shown, "tune: still waiting to start train again in 40 s, for 0 s\n")


def test_a_failed_request_is_told_at_once_but_not_for_each_of_many_files() -> None:
    shown = StringIO()
    with LiveView(Console(file=shown, width=200), "tune") as view:
        for number in range(8):
            view.said(SaidLine(f"file {number}: no answer (ConnectError); again in 2.4 s", is_waiting=True))
    assert shown.getvalue() == "tune: waiting: file 0: no answer (ConnectError); again in 2.4 s\n"


def test_a_rehearsal_in_a_file_has_a_line_per_stage_and_signs_of_life() -> None:
    shown = StringIO()
    with _RehearsalPrinter(Console(file=shown, width=200), "tune", silence_seconds=SILENCE) as heard:
        heard.begins(Path("rehearsal.log"))
        text = waited_for(shown, "tune: still looking at the model, for 0 s\n")
        assert text.startswith("tune: looking at the model, then trying the job on a scaled-down one (output: rehearsal.log)\n")
        heard.take({"stage": {"stage": "build", "seconds": 1.0, "problem": ""}})
        waited_for(shown, "  build      1.0 s  right\ntune: still rehearsing, for 0 s: the last stage that has ended is build\n")


def test_a_merge_in_a_file_has_a_line_per_stage_and_signs_of_life() -> None:
    shown = StringIO()
    with MergeView(Console(file=shown, width=200), silence_seconds=SILENCE) as view:
        view.progressed(int(1e9), int(4e9))
        view.progressed(int(2e9), int(4e9))
        waited_for(shown, "still merging, for 0 s: 2.0 of 4.0 GB written\n")
        view.begins("verifying")
    assert [line for line in shown.getvalue().splitlines() if "still" not in line] == ["reading headers", "merging", "verifying"]


class Terminal(StringIO):
    """One that can be closed."""

    is_there = True

    def isatty(self) -> bool:
        return self.is_there


@pytest.mark.parametrize("view", [lambda console: LiveView(console, "tune"), MergeView])
def test_a_terminal_that_goes_away_meanwhile_is_no_error(view: Callable[[Console], LiveView | MergeView]) -> None:
    terminal = Terminal()
    with view(Console(file=terminal)):
        terminal.is_there = False
    assert terminal.getvalue()


def test_only_lines_of_the_trainer_are_heard(tmp_path: Path) -> None:
    path = tmp_path / "fetch-0.log"
    heard = RoleOutput(path)
    assert heard.new_lines() == []
    stamp = "2026-11-26 14:25:07,166"
    path.write_text(
        f"{stamp} WARNING finetune_trainer.network.retry hf://a/b: no answer (ConnectError); again in 0.8 s\n"
        f"{stamp} INFO finetune_trainer.roles.fetch model: asking hf://a/b which files there are\n"
        f"{stamp} INFO httpx GET https://example.test\nTraceback\n{stamp} INFO finetune_trainer.roles.fetch half"
    )
    assert heard.new_lines() == [
        SaidLine("hf://a/b: no answer (ConnectError); again in 0.8 s", is_waiting=True),
        SaidLine("model: asking hf://a/b which files there are"),
    ]
    with path.open("a") as file:
        file.write(" a line\n")
    assert heard.new_lines() == [SaidLine("half a line")]
    with path.open("ab") as file:
        file.write(b"\xff" * 200_000 + f"\n{stamp} INFO finetune_trainer.roles.fetch last\n".encode())
    assert heard.new_lines() == [SaidLine("last")]
    assert RoleOutput(path, from_end=True).new_lines() == []


def test_what_the_trainer_logs_of_a_failed_request_is_heard(tmp_path: Path) -> None:
    """Cause and next attempt, in the trainer's own words and format."""
    path = tmp_path / "fetch-0.log"
    logger, handler = logging.getLogger("finetune_trainer"), logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.addHandler(handler)
    try:
        retries = Retries("hf://a/b", RetryPolicy(first_seconds=0.0), threading.Event(), source_unavailable)
        retries.failed(TransientError("no answer (ConnectError)"))
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert RoleOutput(path).new_lines() == [
        SaidLine("hf://a/b: no answer (ConnectError); trying again in 0.0 s", is_waiting=True)
    ]
