"""What a person sees while data is prepared."""

import logging
import sys

from finetune_trainer.data import progress
from finetune_trainer.data.progress import PreparingProgress, line


def test_a_progress_line_has_amount_speed_and_remaining_time():
    assert line(120_000_000, 1_000_000_000, 6.0) == "prepared 120.0 of 1000.0 MB, 20.0 MB/s, 44 s left"
    assert line(1_000_000, 1_000_000, 2.0) == "prepared 1.0 of 1.0 MB, 0.5 MB/s"


def test_without_a_terminal_progress_is_logged_now_and_then_and_at_the_end(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with PreparingProgress(3_000_000) as shown:
        shown.advance(1_000_000)
        shown.advance(2_000_000)
    assert [message.split(" MB,")[0] for message in caplog.messages] == [
        "prepared 1.0 of 3.0",
        "prepared 3.0 of 3.0",
        "prepared 3.0 of 3.0",
    ]


def test_on_a_terminal_there_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with PreparingProgress(3_000_000) as shown:
        shown.advance(3_000_000)
    assert "3.00M/3.00M" in capsys.readouterr().err
