"""The summary of the suites tells the truth."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.suites import LIMIT_PROCESSOR_MINUTES, PYTEST, ROOT, SUITES, Group, Result, Suite, run, run_all, summary

SUITE = Suite("one", 2.0, (("true",),))
RUN_REAPED = "import sys; from tests import reaped; reaped.PATIENCE_SECONDS = 0.2; sys.exit(reaped.main(sys.argv[1:]))"
BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_a_failed_command_fails_the_run_and_is_named() -> None:
    text, held = summary([Result(SUITE, 1.0, 1.0, ()), Result(SUITE, 1.0, 1.0, ("pytest tests/unit",))], 2.0)
    assert not held
    assert "FAILED: pytest tests/unit" in text


def test_processor_minutes_are_shown_with_their_budget_and_a_slow_machine_fails_nothing() -> None:
    text, held = summary([Result(SUITE, 1000.0, 2.5, ())], 1000.0)
    assert held
    assert "1000.0        2.5     2.0  passed  over budget" in text
    text, _ = summary([Result(SUITE, 1000.0, 1.5, ())], 1000.0)
    assert "over budget" not in text


def test_the_whole_run_takes_the_time_of_its_groups_together_and_the_processor_time_of_each() -> None:
    text, _ = summary([Result(SUITE, 30.0, 20.0, ()), Result(SUITE, 31.0, 10.0, ())], 32.0)
    assert text.splitlines()[-1].split() == ["all", "32.0", "30.0", "70.0"]


def test_what_did_not_run_stands_below_its_suite_with_the_reason() -> None:
    not_run = {"left for `make nightly`": ["a.py::one", "a.py::two", "b.py::three"], "Skipped: needs root": ["c.py::four"]}
    text, held = summary([Result(SUITE, 1.0, 1.0, (), not_run), Result(SUITE, 1.0, 1.0, ())], 2.0)
    assert held
    assert text.splitlines()[3:5] == [
        "    3 not run: left for `make nightly`, a.py, b.py",
        "    1 not run: Skipped: needs root, c.py::four",
    ]


NIGHT_AND_DAY = """
import pytest

@pytest.mark.nightly
def test_long(): ...

@pytest.mark.skip(reason="needs root")
def test_skipped(): ...

def test_short(): ...
"""


@pytest.mark.nightly
def test_tests_for_the_night_and_skipped_ones_are_noted_once_by_two_workers(tmp_path: Path) -> None:
    test = tmp_path / "test_all.py"
    test.write_text(NIGHT_AND_DAY)
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\npythonpath = {ROOT}\n")
    command = (*PYTEST, "-p", "no:cacheprovider", "-n", "2", str(tmp_path))
    result = run(Suite("one", 1.0, (command, ("sh", "-c", "exit 0"))))
    assert result.failed == ()
    assert {reason: [name.rpartition("::")[2] for name in tests] for reason, tests in result.left_out.items()} == {
        "Skipped: needs root": ["test_skipped"],
        "left for `make nightly`": ["test_long"],
    }


def test_every_pytest_suite_leaves_the_night_out() -> None:
    commands = [command for suite in SUITES for command in suite.commands if command[0].endswith("pytest")]
    assert len(commands) >= 7
    assert all(command[command.index("-m") + 1] == "not nightly" for command in commands)


def test_every_command_runs_although_one_fails_and_its_processor_time_is_counted() -> None:
    result = run(Suite("two", 1.0, ((sys.executable, "-c", "raise SystemExit(3)"), (sys.executable, "-c", BUSY))))
    assert len(result.failed) == 1
    assert 0.3 / 60 <= result.processor_minutes < 1


def test_the_time_of_what_a_command_does_not_wait_for_is_counted_too() -> None:
    """Neither the command nor its child waits for the one that computes."""
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BUSY!r}])"
    result = run(Suite("leaver", 1.0, ((sys.executable, "-c", orphan),)))
    assert result.failed == ()
    assert 0.3 / 60 <= result.processor_minutes < 1


def test_what_a_command_leaves_running_is_named() -> None:
    left = subprocess.Popen(
        [sys.executable, "-c", RUN_REAPED, "sh", "-c", "sleep 600 2>/dev/null & exit 4"], stderr=subprocess.PIPE, text=True
    )
    _, printed = left.communicate(timeout=60)
    assert left.returncode == 4
    match = re.fullmatch(r"left running by sh: (\d+) sleep 600\n", printed)
    assert match is not None, printed
    os.kill(int(match[1]), signal.SIGKILL)


INTERRUPTED = """
import sys, time
from pathlib import Path
try:
    Path(sys.argv[1], "begun").touch()
    time.sleep(60)
except KeyboardInterrupt:
    Path(sys.argv[1], "taken down").touch()
"""


def test_a_command_takes_down_what_it_set_up_if_the_run_is_killed(tmp_path: Path) -> None:
    start = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-m", "tests.reaped", sys.executable, "-c", INTERRUPTED, tmp_path]
    runner = subprocess.Popen([sys.executable, "-c", start, *command], cwd=ROOT)
    wait_for(tmp_path / "begun")
    runner.kill()
    runner.wait()
    wait_for(tmp_path / "taken down")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_a_command_that_a_signal_ends_is_no_success() -> None:
    finished = subprocess.run([sys.executable, "-c", RUN_REAPED, "sh", "-c", "kill -TERM $$"], check=False)
    assert finished.returncode == 128 + signal.SIGTERM


def test_groups_run_at_the_same_time_and_print_one_suite_after_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each waits for what the other does, and prints before and after it has waited."""

    def suite(own: str, other: str) -> Suite:
        code = (
            f"import pathlib, time\nprint('first of {own}')\npathlib.Path({str(tmp_path / own)!r}).touch()\n"
            f"while not pathlib.Path({str(tmp_path / other)!r}).exists(): time.sleep(0.01)\nprint('last of {own}')"
        )
        return Suite(own, 1.0, ((sys.executable, "-c", code), (sys.executable, "-c", "raise SystemExit('no')")))

    results = run_all([Group((suite("a", "b"),)), Group((suite("b", "a"), Suite("c", 1.0, ((sys.executable, "-c", BUSY),))))])
    assert [(result.suite.name, len(result.failed)) for result in results] == [("a", 1), ("b", 1), ("c", 0)]
    assert results[2].processor_minutes >= 0.3 / 60
    assert results[0].processor_minutes < 0.3 / 60
    printed = capfd.readouterr().out
    for name in "ab":
        assert f"first of {name}\nlast of {name}\nno\n" in printed


def test_a_group_alone_prints_as_it_goes_and_its_prefix_is_before_each_command(capfd: pytest.CaptureFixture[str]) -> None:
    results = run_all([Group((Suite("a", 1.0, (("sh", "-c", "echo $ASKED"),)),), prefix=("env", "ASKED=heard"))])
    assert results[0].failed == ()
    assert "=== a (budget 1 processor minutes)\nheard\n" in capfd.readouterr().out


def test_the_budgets_fit_into_the_limit() -> None:
    assert sum(suite.budget_minutes for suite in SUITES) <= LIMIT_PROCESSOR_MINUTES
