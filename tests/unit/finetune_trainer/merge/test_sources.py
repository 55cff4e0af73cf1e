"""Input files are read at any position, and the bytes that are read are counted."""

import struct
from pathlib import Path

import pytest

from finetune_trainer.merge.sources import Sources
from finetune_trainer.weights import errors
from finetune_trainer.weights.headers import TensorHeader


@pytest.fixture
def header(tmp_path: Path) -> TensorHeader:
    """Write six float32 numbers after three other bytes."""
    path = tmp_path / "weights"
    path.write_bytes(b"abc" + struct.pack("<6f", 1, 2, 3, 4, 5, 6))
    return TensorHeader("weight", "F32", (2, 3), path, 3)


def test_a_tensor_is_read_whole_and_in_parts(header: TensorHeader) -> None:
    sources = Sources([header.file])
    assert sources.tensor(header).tolist() == [[1, 2, 3], [4, 5, 6]]
    part = bytearray(8)
    sources.read_into(header, 12, memoryview(part))
    assert struct.unpack("<2f", part) == (4, 5)
    assert sources.bytes_read == 24 + 8
    sources.close()


def test_an_empty_tensor_is_read(header: TensorHeader) -> None:
    sources = Sources([header.file])
    assert sources.tensor(TensorHeader("none", "F32", (0, 3), header.file, 3)).shape == (0, 3)
    sources.close()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.StorageError, match="absent could not be read"):
        Sources([tmp_path / "absent"])
