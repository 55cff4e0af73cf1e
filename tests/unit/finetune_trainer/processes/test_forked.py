"""Forked children keep to their bounds, and their parent believes nothing of what they answer."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch  # noqa: F401 - children of the rehearsal import it, and need no seconds for that if it is there

from finetune_trainer.processes import forked
from finetune_trainer.processes.forked import BoundsExceededError, ResourceBounds, run_children
from tests.support.living import living

BOUND = 0.5
"""Seconds of processor time that is exceeded on purpose."""


@pytest.fixture(autouse=True)
def family() -> object:
    """No child is left by any test."""
    before = psutil.Process().children(recursive=True)
    yield
    assert [each for each in living(psutil.Process().children(recursive=True)) if each not in before] == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b'{"code": -999, "value": 1}', ""),
        (b'{"error": "no"}', "no"),
        (b'{"code": -9, "error": "no"}', "no"),
        (b"\x80\x04garbage", "a process answered with something other than a result"),
        (b" " * (forked.ANSWER_BYTES + (1 << 17)), "a process wrote more than it may"),
    ],
)
def test_an_answer_is_read_and_not_believed(answer: bytes, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "encode_answer", lambda _: answer)
    bounds = ResourceBounds(time.monotonic() + 300, 1 << 40)
    ended = run_children({"one": int}, tmp_path, bounds, together=False)["one"]
    assert (ended.problem, ended.code) == (problem, 1 if problem else 0)


def test_a_child_of_the_rehearsal_that_never_ends_exceeds_its_time(tmp_path: Path) -> None:
    with pytest.raises(BoundsExceededError, match="did not end in time"):
        run_children({"one": lambda: time.sleep(3600)}, tmp_path, ResourceBounds(time.monotonic() + 1, 1 << 40), together=False)


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_children_that_compute_too_long_exceed_their_processor_time(tmp_path: Path) -> None:
    bounds = ResourceBounds(time.monotonic() + 120, 1 << 40, _used() + BOUND)
    with pytest.raises(BoundsExceededError, match="of processor time"):
        run_children({"one": lambda: busy(3600), "two": lambda: time.sleep(3600)}, tmp_path, bounds, together=False)


def test_what_a_running_child_has_used_so_far_counts() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while sum(psutil.Process(process.pid).cpu_times()[:2]) < 2 * BOUND:
            time.sleep(0.1)
        bounds = ResourceBounds(time.monotonic() + 300, 1 << 40, _used() + BOUND)
        bounds.look([])
        with pytest.raises(BoundsExceededError, match="of processor time"):
            bounds.look([process.pid])
    finally:
        process.kill()
        process.wait()


def test_what_children_that_have_ended_took_counts_as_well() -> None:
    bounds = ResourceBounds(time.monotonic() + 300, 1 << 40, _used() + BOUND)
    bounds.look([])
    computing = f"import time\nwhile time.process_time() < {2 * BOUND}: pass"
    subprocess.run([sys.executable, "-c", computing], check=True)
    with pytest.raises(BoundsExceededError, match="of processor time"):
        bounds.look([])


def test_a_child_that_waits_takes_no_processor_time() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        bounds = ResourceBounds(time.monotonic() + 300, 1 << 40, _used() + BOUND)
        time.sleep(2 * BOUND)
        bounds.look([process.pid])
    finally:
        process.kill()
        process.wait()


def _used() -> float:
    """By this process and the children that it has had."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def test_the_log_of_a_child_is_read_only_if_it_is_a_file(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "one.log").unlink()
        os.mkfifo(tmp_path / "one.log")
        raise ValueError("no such luck")

    bounds = ResourceBounds(time.monotonic() + 300, 1 << 40)
    ended = run_children({"one": work}, tmp_path, bounds, together=False)["one"]
    assert (ended.error, ended.message, ended.log_tail) == ("ValueError: no such luck", "no such luck", "")


def test_values_of_children_arrive_and_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    bounds = ResourceBounds(time.monotonic() + 300, 1 << 40)
    apart = run_children({"one": lambda: {"a": [1, None]}, "two": lambda: None}, tmp_path, bounds, together=False)
    assert {name: (ended.code, ended.value) for name, ended in apart.items()} == {"one": (0, {"a": [1, None]}), "two": (0, None)}
    gang = run_children({"one": lambda: time.sleep(3600), "two": lambda: os._exit(7)}, tmp_path, bounds, together=True)
    assert {name: ended.code for name, ended in gang.items()} == {"one": -signal.SIGKILL, "two": 7}


def test_memory_is_measured_at_once_where_it_may_be_too_much_and_now_and_then_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    taken = {"resident": 10, "proportional": 4}

    def proportional(process: int) -> int:
        measured.append(process)
        return taken["proportional"]

    monkeypatch.setattr(forked, "resident_bytes", lambda _: taken["resident"])
    monkeypatch.setattr(forked, "proportional_bytes", proportional)
    bounds = ResourceBounds(time.monotonic() + 300, 100)
    bounds.look([1, 2])
    bounds.look([1, 2])
    assert measured == [1, 2]
    assert bounds.peak_memory_bytes == 8
    taken["resident"] = 60
    bounds.look([1, 2])
    assert measured == [1, 2, 1, 2]
    taken["proportional"] = 51
    with pytest.raises(BoundsExceededError, match="of memory"):
        bounds.look([1, 2])
    monkeypatch.setattr(forked, "MEASURE_SECONDS", 0.0)
    taken.update(resident=10, proportional=5)
    bounds.look([1, 2])
    assert len(measured) == 8


def test_what_is_resident_is_never_less_than_its_share() -> None:
    assert forked.resident_bytes(os.getpid()) * 1.01 > forked.proportional_bytes(os.getpid()) > 1 << 20
    assert forked.resident_bytes(2**30) == 0
