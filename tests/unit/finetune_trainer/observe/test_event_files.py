"""Event files: the bytes that TensorBoard's own writer makes (2.21 was asked once), and what one attempt leaves for the next."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_trainer.observe.event_files import TensorBoard, crc32c, record, scalars_event, start_event, version_event

OF_TENSORBOARD = {
    "scalar": (scalars_event(1.5, 300, {"loss": 0.5}), "09000000000000f83f10ac022a0d0a0b0a046c6f7373150000003f"),
    "version": (version_event(1.5), "09000000000000f83f1a0d627261696e2e4576656e743a32"),
    "start": (start_event(1.5, 6), "09000000000000f83f10063a020801"),
    "record": (record(start_event(1.5, 6)), "0f000000000000006d532b0909000000000000f83f10063a0208019517399e"),
}


@pytest.mark.parametrize("name", OF_TENSORBOARD)
def test_bytes_are_those_of_tensorboard(name: str) -> None:
    made, expected = OF_TENSORBOARD[name]
    assert made.hex() == expected


def test_the_check_is_the_one_of_its_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


@pytest.mark.parametrize(("value", "expected"), [(1e300, math.inf), (-1e300, -math.inf), (0.1, 0.10000000149011612)])
def test_values_are_as_near_as_four_bytes_come(value: float, expected: float) -> None:
    assert struct.unpack("<f", scalars_event(0.0, 0, {"x": value})[-4:])[0] == expected


def records(content: bytes) -> Iterator[bytes]:
    """Taken apart again."""
    while content:
        (length,) = struct.unpack_from("<Q", content)
        data = content[12 : 12 + length]
        assert record(data) == content[: 16 + length]
        yield data
        content = content[16 + length :]


def test_each_attempt_has_its_file_and_says_which_steps_count(tmp_path: Path) -> None:
    moments = iter([1000.0, 1001.0, 1002.0, 2000.0])
    first = TensorBoard(lambda: next(moments))
    first.start({"directory": str(tmp_path), "attempt": 0, "step": 0})
    first.log(1, {"loss": 2.5, "attempt": 0})
    first.log(2, {"loss": 2.0})
    # Not closed: what was logged is in the file at once, whenever the process dies.
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert list(records(file.read_bytes())) == [
        version_event(1000.0),
        start_event(1000.0, 1),
        scalars_event(1001.0, 1, {"loss": 2.5}),
        scalars_event(1002.0, 2, {"loss": 2.0}),
    ]
    first.finish("Succeeded")
    second = TensorBoard(lambda: next(moments))
    second.start({"directory": str(tmp_path), "attempt": 1, "step": 1})
    second.finish("Succeeded")
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert [name.split(".")[3] for name in names] == ["0000001000", "0000002000"]
    assert start_event(2000.0, 2) in list(records((tmp_path / "tensorboard" / names[1]).read_bytes()))


def test_what_begins_again_in_the_same_second_has_a_file_of_its_own(tmp_path: Path) -> None:
    for step in (0, 3, 5):
        tracker = TensorBoard(lambda: 1000.5)
        tracker.start({"directory": str(tmp_path), "attempt": 0, "step": step})
        tracker.finish("Succeeded")
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert [file.name.split(".")[3] for file in files] == ["0000001000", "0000001001", "0000001002"]
    assert [list(records(file.read_bytes()))[1] for file in files] == [start_event(1000.5, step) for step in (1, 4, 6)]
