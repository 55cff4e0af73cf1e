"""A suite that fails is never told as one that passed."""

import signal
import subprocess
import sys

from tests.suites import Result, Suite, run, summary

SUITE = Suite("one", 2.0, (("true",),))
RUN_REAPED = "import sys; from tests import reaped; reaped.PATIENCE_SECONDS = 0.2; sys.exit(reaped.main(sys.argv[1:]))"
BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_a_failed_command_fails_the_run_and_is_named() -> None:
    text, held = summary([Result(SUITE, 1.0, 1.0, ()), Result(SUITE, 1.0, 1.0, ("pytest tests/unit",))], 2.0)
    assert not held
    assert "FAILED: pytest tests/unit" in text


def test_every_command_runs_although_one_fails_and_its_processor_time_is_counted() -> None:
    result = run(Suite("two", 1.0, ((sys.executable, "-c", "raise SystemExit(3)"), (sys.executable, "-c", BUSY))))
    assert len(result.failed) == 1
    assert 0.3 / 60 <= result.processor_minutes < 1


def test_a_command_that_a_signal_ends_is_no_success() -> None:
    finished = subprocess.run([sys.executable, "-c", RUN_REAPED, "sh", "-c", "kill -TERM $$"], check=False)
    assert finished.returncode == 128 + signal.SIGTERM
