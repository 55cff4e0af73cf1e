"""A copy of a model's weights in which the embeddings have rows for added tokens.

Files without embeddings become links to the model's own files, or copies. The others are written again, tensor after tensor,
block after block. A new row is the mean of the rows of all known tokens, as in transformers' resize_token_embeddings without its
noise, so that an untrained token is as likely as any other.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.files import open_within, sync_file
from finetune_trainer.weights.errors import BrokenCheckpointError, UnsupportedBaseError
from finetune_trainer.weights.headers import DTYPE_BYTES, INDEX_FILE, Checkpoint, TensorHeader, read_header, read_json
from finetune_trainer.weights.rounding import TORCH_DTYPES
from finetune_trainer.weights.stored import StoredModel

BLOCK_BYTES = 16 << 20
"""Bytes that are copied or summed at a time."""
_ALIGNMENT = 8
"""Alignment of tensors in bytes, as in the safetensors library."""
_RESIZED_BIAS = "final_logits_bias"


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a model that have a row for each token."""

    tensors: Mapping[str, TensorHeader]
    """Tensors by their names in the files."""
    num_rows: int
    embedding: str
    """Last part of the input embedding's path, by which PEFT names modules."""
    head: str
    """Last part of the output head's path."""
    separate_head: str | None
    """The output head, if it does not share the embedding's values."""


def vocabulary_of(model: StoredModel, *, saved_whole: Collection[str] | None) -> Vocabulary:
    """Find the tensors that have a row for each token.

    saved_whole: names of modules that an adapter holds whole (of others it holds only rows of weights); None: there is no
    adapter.
    Raises UnsupportedBaseError if rows cannot be added.
    """
    parameters = model.vocabulary()
    sources = set(model.family.ties.values()) - set(model.family.ties)
    embedding = next((path for path in sorted(sources) if path in parameters), None)
    if embedding is None or len(parameters[embedding].parts) != 1:
        raise UnsupportedBaseError("the files hold no input embedding that is known by its name")
    other = next((path for path in model.parameters if path in model.embeddings and path not in parameters), None)
    if other is not None:
        counts = f"{other} has {model.parameters[other].shape[0]} rows and {embedding} {parameters[embedding].shape[0]}"
        raise UnsupportedBaseError(f"{counts}, so the ids of tokens would not be the same in both")
    apart = next((path for path in model.parameters if path.rpartition(".")[2] == _RESIZED_BIAS), None)
    if apart is not None:
        raise UnsupportedBaseError(f"{apart} has a value for each token, and is part of neither embedding nor output head")
    biased = [path.removesuffix(".bias") for path in parameters if path.endswith(".bias")]
    lost = next((module for module in biased if not _is_held_whole(module, saved_whole)), None)
    if lost is not None:
        raise UnsupportedBaseError(
            f"{lost}.bias has a value for each token, and an adapter holds none for added ones unless modulesToSave names "
            f"{lost.rpartition('.')[2]}"
        )
    empty = next((parameter.path for parameter in parameters.values() if 0 in parameter.shape), None)
    if empty is not None:
        raise UnsupportedBaseError(f"{empty} holds no value")
    wrong = next((parameter for parameter in parameters.values() if parameter.dtype not in TORCH_DTYPES), None)
    if wrong is not None:
        raise UnsupportedBaseError(f"{wrong.path} has the element type {wrong.dtype}, of which there is no mean")
    heads = [path for path in model.family.ties if path.endswith(".weight")]
    separate = [path for path in heads if path in parameters and model.tie(path) is None]
    return Vocabulary(
        tensors={part.header.name: part.header for parameter in parameters.values() for part in parameter.parts},
        num_rows=parameters[embedding].shape[0],
        embedding=_module(embedding),
        head=_module(separate[0] if separate else heads[-1]),
        separate_head=_module(separate[0]) if separate else None,
    )


def _is_held_whole(module: str, saved_whole: Collection[str] | None) -> bool:
    return saved_whole is None or any(f".{module}".endswith(f".{name}") for name in saved_whole)


def _module(path: str) -> str:
    return path.removesuffix(".weight").rpartition(".")[2]


def written_bytes(checkpoint: Checkpoint, vocabulary: Vocabulary, num_rows: int, directory: Path) -> int:
    """Bytes that the copy takes in `directory`, which exists. Files on the same file system become links."""
    changed = {header.file.name for header in vocabulary.tensors.values()}
    device = directory.stat().st_dev
    rows = sum((num_rows - vocabulary.num_rows) * _row_bytes(header) for header in vocabulary.tensors.values())
    return rows + sum(
        size
        for name, size in checkpoint.file_bytes.items()
        if name in changed or (checkpoint.directory / name).stat().st_dev != device
    )


def write_with_rows(
    checkpoint: Checkpoint,
    root: Path,
    target: Path,
    vocabulary: Vocabulary,
    *,
    num_known: int,
    added: Collection[int],
    num_rows: int,
) -> None:
    """Write weights and index to the directory `target`, durably.

    root: directory below which links of the model may lead. num_known: number of tokens before any were added, over whose rows
    the mean is taken. added: ids of the added tokens; rows beyond the model's own are theirs, too. Raises BrokenCheckpointError,
    OSError.
    """
    changed = {header.file.name for header in vocabulary.tensors.values()}
    for name in checkpoint.file_bytes:
        with open_within(checkpoint.directory / name, root) as source:
            if name in changed:
                tensors = read_header(checkpoint.directory / name)
                grown = [
                    _Grown(tensor, num_rows, num_known, added) if tensor.name in vocabulary.tensors else tensor
                    for tensor in tensors
                ]
                _write(source, grown, target / name)
            else:
                link_or_copy(source, target / name)
        sync_file(target / name)
    index = checkpoint.directory / INDEX_FILE
    if index.exists():
        content = _with_larger_totals(read_json(index), [*vocabulary.tensors.values()], num_rows)
        (target / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")
        sync_file(target / INDEX_FILE)


def link_or_copy(source: BufferedReader, target: Path) -> None:
    """Link the open file to another name, or copy it if the file system or the owner's rights do not allow a link."""
    descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # By its descriptor, since the path may now lead elsewhere. Without a directory descriptor Python does not follow the
        # link.
        os.link(str(source.fileno()), target, src_dir_fd=descriptors, follow_symlinks=True)
    except OSError:
        with target.open("wb") as copy:
            shutil.copyfileobj(source, copy, BLOCK_BYTES)
    finally:
        os.close(descriptors)


@dataclass(frozen=True)
class _Grown:
    """A tensor with rows for added tokens."""

    stored: TensorHeader
    num_rows: int
    num_known: int
    added: Collection[int]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.stored.shape[1:])

    def write(self, source: BufferedReader, target: BufferedWriter) -> None:
        mean = self._mean(source)
        for first, rows in _blocks(source, self.stored):
            for row in self.added:
                if 0 <= row - first < len(rows):
                    rows[row - first] = mean
            target.write(_bytes(rows))
        target.writelines(_bytes(mean) for _ in range(self.stored.shape[0], self.num_rows))

    def _mean(self, source: BufferedReader) -> torch.Tensor:
        total = torch.zeros(self.stored.shape[1:], dtype=torch.float64)
        count = min(self.num_known, self.stored.shape[0])
        for first, rows in _blocks(source, self.stored):
            if first < count:
                total += rows[: count - first].double().sum(dim=0)
        return (total / max(count, 1)).to(TORCH_DTYPES[self.stored.dtype])


def _write(source: BufferedReader, tensors: Sequence[TensorHeader | _Grown], target: Path) -> None:
    """Write a safetensors file of these tensors, with the metadata of the source file."""
    entries: dict[str, Any] = {}
    metadata = _metadata(source)
    if metadata is not None:
        entries["__metadata__"] = metadata
    position = 0
    for tensor in tensors:
        stored = tensor.stored if isinstance(tensor, _Grown) else tensor
        size = math.prod(tensor.shape) * DTYPE_BYTES[stored.dtype]
        entries[stored.name] = {"dtype": stored.dtype, "shape": list(tensor.shape), "data_offsets": [position, position + size]}
        position += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors:
            if isinstance(tensor, _Grown):
                tensor.write(source, file)
            else:
                _copy(source, tensor, file)


def _metadata(source: BufferedReader) -> dict[str, Any] | None:
    source.seek(0)
    (length,) = struct.unpack("<Q", source.read(8))
    metadata: dict[str, Any] | None = json.loads(source.read(length)).get("__metadata__")
    return metadata


def _copy(source: BufferedReader, tensor: TensorHeader, target: BufferedWriter) -> None:
    source.seek(tensor.offset)
    remaining = tensor.num_bytes
    while remaining:
        block = source.read(min(remaining, BLOCK_BYTES))
        if not block:
            raise _cut_short(tensor)
        target.write(block)
        remaining -= len(block)


def _blocks(source: BufferedReader, tensor: TensorHeader) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield consecutive rows, with the number of the first."""
    width = _row_bytes(tensor)
    at_once = max(1, BLOCK_BYTES // width)
    for first in range(0, tensor.shape[0], at_once):
        count = min(at_once, tensor.shape[0] - first)
        source.seek(tensor.offset + first * width)
        block = bytearray(source.read(count * width))
        if len(block) != count * width:
            raise _cut_short(tensor)
        yield first, torch.frombuffer(block, dtype=TORCH_DTYPES[tensor.dtype]).view(count, *tensor.shape[1:])


def _row_bytes(tensor: TensorHeader) -> int:
    return tensor.num_bytes // tensor.shape[0]


def _bytes(values: torch.Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def _cut_short(tensor: TensorHeader) -> BrokenCheckpointError:
    return BrokenCheckpointError(f"{tensor.file}: ended inside tensor {tensor.name} while it was read. Fetch it again.")


def _with_larger_totals(index: Mapping[str, Any], grown: Sequence[TensorHeader], num_rows: int) -> dict[str, Any]:
    metadata = index.get("metadata")
    more = {
        "total_size": sum((num_rows - tensor.shape[0]) * _row_bytes(tensor) for tensor in grown),
        "total_parameters": sum((num_rows - tensor.shape[0]) * math.prod(tensor.shape[1:]) for tensor in grown),
    }
    known = metadata if isinstance(metadata, Mapping) else {}
    sums = {name: known[name] + count for name, count in more.items() if type(known.get(name)) is int}
    return {**index, "metadata": {**known, **sums}} if sums else dict(index)
