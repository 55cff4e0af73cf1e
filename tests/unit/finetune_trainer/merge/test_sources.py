"""Input files are read at positions, counted, and named when they end early."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from finetune_trainer.merge.sources import Sources
from finetune_trainer.weights import errors
from finetune_trainer.weights.headers import TensorHeader


@pytest.fixture
def header(tmp_path: Path) -> TensorHeader:
    """Six float32 numbers after three bytes of something else."""
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


@pytest.mark.parametrize(("keeps", "num_read"), [(0, 4), (1, 3), (2, 2)])
def test_a_reader_reads_again_what_it_does_not_hold_any_more(header: TensorHeader, keeps: int, num_read: int) -> None:
    other = TensorHeader("other", "F32", (2, 3), header.file, 3)
    sources = Sources([header.file])
    read = sources.reader(keeps=keeps)
    for wanted in (header, header, other, header):
        assert torch.equal(read(wanted), torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    assert sources.bytes_read == num_read * 24
    sources.close()


def test_a_file_that_ends_inside_a_tensor_is_named(header: TensorHeader) -> None:
    header.file.write_bytes(header.file.read_bytes()[:-5])
    sources = Sources([header.file])
    with pytest.raises(errors.BrokenCheckpointError, match=r"weights: ended inside tensor weight .* 5 of 24 bytes are missing"):
        sources.tensor(header)
    sources.close()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.StorageError, match="absent: could not be read"):
        Sources([tmp_path / "absent"])
