"""Compares the bytes of two checkpoints, trained results or merged models, and describes the first difference.

Which files hold a parameter depends on the number of ranks, so values are compared instead of files. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.checkpoint.manifest import MANIFEST, decode_manifest
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import open_regular, read_own, sha256_beneath
from finetune_trainer.weights.headers import DTYPE_BYTES, TensorHeader, read_header

_CHUNK_BYTES = 1 << 20
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class _Part:
    """The part of a tensor that one file holds; `start` is the index of the part's first element."""

    start: int
    header: TensorHeader

    @property
    def stop(self) -> int:
        return self.start + self.header.num_bytes // DTYPE_BYTES[self.header.dtype]


_Tensors = Mapping[str, Sequence[_Part]]
"""Name of each tensor -> the tensor's parts, in order."""


def checkpoint_difference(expected: Path, found: Path) -> str | None:
    """Describe the first difference between two checkpoints: in parameters, optimizer state, or other state of the run.

    Raises CheckpointError, BrokenCheckpointError, OSError.
    """
    manifests = [decode_manifest(read_own(directory / MANIFEST)) for directory in (expected, found)]
    ours, theirs = (
        {"step": manifest.step, "optimizer": manifest.optimizer, **manifest.state.model_dump()} for manifest in manifests
    )
    tensors = _first_tensor(_checkpoint_tensors(expected), _checkpoint_tensors(found))
    return tensors or _first_value(ours, theirs)


def results_difference(expected: Path, found: Path, names: Sequence[str]) -> str | None:
    """Describe the first difference between the files with these names in two directories. Weights are compared by tensor.

    Raises BrokenCheckpointError, OSError.
    """
    for name in sorted(names, key=lambda name: not name.endswith(_SUFFIX)):
        missing = [path for path in (expected / name, found / name) if not path.is_file()]
        if missing:
            return f"{name} is missing in {missing[0].parent}"
        if name.endswith(_SUFFIX):
            ours, theirs = (
                {header.name: [_Part(0, header)] for header in read_header(place / name)} for place in (expected, found)
            )
            difference = _first_tensor(ours, theirs)
            if difference is not None:
                return difference
        if sha256_beneath(expected, name) != sha256_beneath(found, name):
            return f"{name} has different bytes"
    return None


def _checkpoint_tensors(directory: Path) -> _Tensors:
    manifest = decode_manifest(read_own(directory / MANIFEST))
    parts: dict[str, list[_Part]] = {}
    for file in manifest.files:
        starts = {entry.name: entry.start for entry in file.pieces}
        for header in read_header(directory / file.name):
            name = header.name.partition("/")[2]
            if name not in starts:
                raise CheckpointError(f"{directory / file.name} holds {header.name}, which the manifest does not list")
            parts.setdefault(header.name, []).append(_Part(starts[name], header))
    return {name: sorted(parts_of_tensor, key=lambda part: part.start) for name, parts_of_tensor in parts.items()}


def _first_tensor(expected: _Tensors, found: _Tensors) -> str | None:
    for name, ours in expected.items():
        theirs = found.get(name)
        if theirs is None:
            return f"{name} is missing"
        forms = [(parts[0].header.dtype, parts[-1].stop) for parts in (ours, theirs)]
        if forms[0] != forms[1]:
            return f"{name} has {forms[1][1]} values of {forms[1][0]}, not {forms[0][1]} of {forms[0][0]}"
        index = _first_element(_values(ours), _values(theirs))
        if index is not None:
            return f"{name} differs from value {index // DTYPE_BYTES[forms[0][0]]} on"
    extra = [name for name in found if name not in expected]
    return f"{extra[0]} is unexpected" if extra else None


def _first_element(ours: Iterator[bytes], theirs: Iterator[bytes]) -> int | None:
    """Return the position of the first byte that differs, or None. The two iterators may yield chunks of different lengths."""
    position, left, right = 0, b"", b""
    while True:
        left, right = left or next(ours, b""), right or next(theirs, b"")
        length = min(len(left), len(right))
        if length == 0:
            return position if left or right else None
        if left[:length] != right[:length]:
            return position + next(index for index in range(length) if left[index] != right[index])
        position, left, right = position + length, left[length:], right[length:]


def _values(parts: Sequence[_Part]) -> Iterator[bytes]:
    expected = 0
    for part in parts:
        if part.start != expected:
            raise CheckpointError(f"{part.header.file}: {part.header.name} has no values {expected} to {part.start}")
        expected = part.stop
        with open_regular(part.header.file, follow=False) as file:
            file.seek(part.header.offset)
            remaining = part.header.num_bytes
            while remaining:
                chunk = file.read(min(remaining, _CHUNK_BYTES))
                if not chunk:
                    raise CheckpointError(f"{part.header.file}: became shorter while it was read")
                yield chunk
                remaining -= len(chunk)


def _first_value(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    for name, value in expected.items():
        if found[name] != value:
            return f"{name} is {found[name]}, not {value}"
    return None
