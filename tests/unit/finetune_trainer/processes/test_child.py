"""A child is bounded in time and in what it writes, whatever it does, and its parent believes nothing of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from finetune_trainer.processes import child
from finetune_trainer.processes.child import (
    Child,
    ChildEnd,
    ChildOutput,
    Exceeded,
    TooMuchOutputError,
    encode_answer,
    fork,
    fork_answering,
    parse_answer,
    start_answering,
    wait_for_answer,
    wait_for_ends,
)
from tests.support.living import living
from tests.unit.finetune_trainer.processes.hostile_children import BEHAVIOURS

MAX_BYTES = 100_000


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is waited for in vain. All other bounds stay long: the machine may be busy."""
    if "closed" in request.node.name or "too" in request.node.name:
        monkeypatch.setattr(child, "ENDING_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def family() -> object:
    """No child is left by any test."""
    before = psutil.Process().children(recursive=True)
    yield
    assert [each for each in living(psutil.Process().children(recursive=True)) if each not in before] == []


def writes(work: Callable[[int], None]) -> Child:
    """A forked child that is given the writing end of the pipe that its parent reads."""
    reading, writing = os.pipe()
    made = fork(lambda: work(writing), ChildOutput(reading, MAX_BYTES))
    os.close(writing)
    return made


def test_an_answer_arrives_whole_and_the_child_is_gone() -> None:
    end = wait_for_answer(fork_answering(lambda: b"x" * MAX_BYTES, MAX_BYTES), 300)
    assert end.has_answered
    assert end.answer == b"x" * MAX_BYTES
    assert end.code == 0


def test_a_child_that_raises_has_not_answered_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> bytes:
        raise ValueError("no such luck")

    end = wait_for_answer(fork_answering(work, MAX_BYTES), 300)
    assert (end.code, end.has_answered, end.exceeded) == (1, False, None)
    assert "no such luck" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("behaviour", "exceeded"),
    [("garbage", None), ("without_end", Exceeded.OUTPUT), ("never", Exceeded.TIME), ("closed", Exceeded.ENDING)],
)
def test_a_bound_ends_it_and_is_named(behaviour: str, exceeded: Exceeded | None, tmp_path: Path) -> None:
    allowed = 1.0 if behaviour == "never" else 300.0
    end = wait_for_answer(writes(lambda descriptor: BEHAVIOURS[behaviour](descriptor, tmp_path / "trap")), allowed)
    assert end.exceeded is exceeded
    assert end.has_answered == (exceeded is None)
    assert end.code == (0 if exceeded is None else -signal.SIGKILL)
    assert len(end.answer) <= MAX_BYTES + (1 << 16)


def test_an_answer_counts_only_if_the_child_ends_too() -> None:
    def work(descriptor: int) -> None:
        os.write(descriptor, b"[]")
        os.close(descriptor)
        time.sleep(3600)

    end = wait_for_answer(writes(work), 300)
    assert (end.exceeded, end.has_answered) == (Exceeded.ENDING, False)


def test_a_grandchild_that_keeps_the_output_open_holds_nobody_up() -> None:
    holding, released = os.pipe()

    def work(descriptor: int) -> None:
        os.close(released)
        if os.fork() == 0:
            os.read(holding, 1)  # until the test has ended
            os._exit(0)
        os.write(descriptor, b"[1]")

    end = wait_for_answer(writes(work), 300)
    os.close(released)
    os.close(holding)
    assert (end.answer, end.has_answered) == (b"[1]", True)
    assert end.seconds < 100


def test_several_children_are_seen_as_they_end_and_time_passes_meanwhile() -> None:
    held, release = os.pipe()
    slow, fast = fork(lambda: (os.close(release), os.read(held, 1))), fork(lambda: os._exit(3))
    with slow, fast:
        seen = []
        for each in wait_for_ends([slow, fast], float("inf"), look_seconds=0.05):
            seen.append(each)
            if any(seen) and seen.count(None) > 2:
                os.write(release, b"x")
    os.close(held)
    os.close(release)
    assert [(one, end.code) for one, end in filter(None, seen)] == [(fast, 3), (slow, 0)]
    assert seen.count(None) > 2


FORKS_NEXT_TO_A_THREAD = """
import os, threading
from finetune_trainer.processes.child import ThreadsAtForkError, fork
fork(lambda: print("alone")).wait(60)
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    fork(lambda: print("forked"))
except ThreadsAtForkError as error:
    print(f"process {os.getpid()} cannot be forked" in str(error), str(error).count("python"))
"""


def test_a_process_with_threads_is_not_forked() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKS_NEXT_TO_A_THREAD], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.stdout.split() == ["alone", "True", "1"], ended.stderr


def test_a_program_reads_what_it_is_given_and_answers() -> None:
    given = b"x" * 1_000_000  # more than a pipe holds
    command = [sys.executable, "-c", "import sys; print(len(sys.stdin.buffer.read()))"]
    assert wait_for_answer(start_answering(command, dict(os.environ), given, MAX_BYTES), 300).answer == b"1000000\n"


def test_a_program_that_reads_nothing_holds_nobody_up() -> None:
    end = wait_for_answer(start_answering(["sleep", "3600"], dict(os.environ), b"x" * 1_000_000, MAX_BYTES), 0.5)
    assert end.exceeded is Exceeded.TIME


def test_a_child_dies_with_its_parent() -> None:
    code = (
        "import os, time\n"
        "from finetune_trainer.processes.child import fork\n"
        "print(fork(lambda: time.sleep(3600)).pid, flush=True)\n"
        "time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 300
    while living([pid]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_are_taken_one_by_one_and_bounded() -> None:
    reading, writing = os.pipe()
    output = ChildOutput(reading, 10)
    os.write(writing, b"one\ntwo\nth")
    output.read()
    assert [output.take_line(), output.take_line(), output.take_line()] == [b"one", b"two", None]
    os.write(writing, b"ree\n")
    output.read()
    assert output.take_line() == b"three"
    assert not output.has_ended
    os.write(writing, b"x" * 11)
    with pytest.raises(TooMuchOutputError):
        output.read()
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", b"[" * 100_000, b"9" * 10_000, b'{"a": "b"}', b"[1.5]", b"null"])
def test_what_is_not_of_the_form_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse_answer(content, TypeAdapter(list[int]))


def test_texts_that_are_not_unicode_arrive_as_they_were() -> None:
    assert parse_answer(encode_answer(["\udc80 é \ud800"]), TypeAdapter(list[str])) == ["\udc80 é \ud800"]


def test_an_end_without_an_answer_says_so() -> None:
    assert not ChildEnd(0, b"[]", Exceeded.ENDING).has_answered
    assert not ChildEnd(1, b"[]").has_answered
    assert ChildEnd(0, b"[]").has_answered
