"""Event files: the bytes that TensorBoard's own writer makes (2.21 was asked once), and what one attempt leaves for the next."""

import itertools
import math
import struct
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from finetune_trainer.observe.event_files import TensorBoard

OF_TENSORBOARD = {"start": "09000000000000f83f10063a020801", "scalar": "09000000000000f83f10ac022a0d0a0b0a046c6f7373150000003f"}


def records(content: bytes) -> Iterator[bytes]:
    """The records of a file, taken apart by TFRecord's frames; a last one that was cut off is none."""
    while len(content) >= 12:
        (length,) = struct.unpack_from("<Q", content)
        if len(content) < 16 + length:
            return
        data = content[12 : 12 + length]
        assert struct.unpack_from("<I", content, 8)[0] == masked_crc32c(content[:8])
        assert struct.unpack_from("<I", content, 12 + length)[0] == masked_crc32c(data)
        yield data
        content = content[16 + length :]


def files(directory: Path) -> list[Path]:
    return sorted((directory / "tensorboard").iterdir())


def shown(directory: Path) -> list[tuple[int, float]]:
    """Step and value of the points that TensorBoard shows: a start of a run purges what has its step or a later one."""
    points: list[tuple[int, float]] = []
    for file in files(directory):
        for event in map(Event.FromString, records(file.read_bytes())):
            if event.session_log.status == SessionLog.START:
                points = [(step, value) for step, value in points if step < event.step]
            points += [(event.step, each.simple_value) for each in event.summary.value]
    return points


def started(directory: Path, attempt: int = 0, step: int = 0) -> TensorBoard:
    tracker = TensorBoard(lambda: 1.5)
    tracker.start({"directory": str(directory), "attempt": attempt, "step": step})
    return tracker


def test_bytes_are_those_of_tensorboard(tmp_path: Path) -> None:
    tracker = started(tmp_path, step=5)
    tracker.log(300, {"loss": 0.5, "attempt": 0})
    # Not closed: what was logged is in the file at once, whenever the process dies.
    [file] = files(tmp_path)
    version, *others = records(file.read_bytes())
    assert Event.FromString(version).file_version == "brain.Event:2"
    assert [event.hex() for event in others] == list(OF_TENSORBOARD.values())


@pytest.mark.parametrize(("value", "expected"), [(1e300, math.inf), (-1e300, -math.inf), (0.1, 0.10000000149011612)])
def test_values_are_as_near_as_four_bytes_come(tmp_path: Path, value: float, expected: float) -> None:
    started(tmp_path).log(1, {"x": value})
    assert shown(tmp_path) == [(1, expected)]


def test_the_next_attempt_has_a_file_of_its_own_and_takes_steps_back(tmp_path: Path) -> None:
    first = started(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"loss": 1.0})
    first.finish("Succeeded")
    second = started(tmp_path, attempt=1, step=1)
    second.log(2, {"loss": 2.0})
    assert len(files(tmp_path)) == 2
    assert shown(tmp_path) == [(1, 1.0), (2, 2.0)]


def log_for_ever(directory: Path, step: int, logged: Connection) -> None:
    tracker = started(directory, attempt=step, step=step)
    for number in itertools.count(step + 1):
        tracker.log(number, {"loss": float(step)})
        logged.send(number)


def test_no_point_is_lost_or_double_after_a_kill(tmp_path: Path) -> None:
    last = 0
    for step in (0, 20):
        ours, theirs = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=log_for_ever, args=(tmp_path, step, theirs))
        process.start()
        while last < step + 30:
            last = ours.recv()
        process.kill()
        process.join()
        last = step + 30
    points = shown(tmp_path)
    assert [step for step, _ in points[:last]] == list(range(1, last + 1))
    assert [value for _, value in points[:last]] == [0.0] * 20 + [20.0] * 30
    assert len({step for step, _ in points}) == len(points)
