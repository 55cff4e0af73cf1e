"""Copies a model's weights, and adds rows for added tokens to the embeddings.

Files without embeddings are hard-linked to the model's own files, or copied. Files with embeddings are written tensor by
tensor, block by block. A new row is the mean of the rows of all known tokens, as in transformers' resize_token_embeddings but
without noise, so an untrained token is about as likely as other tokens.
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

import torch

from finetune_trainer.files import open_within, sync_file
from finetune_trainer.weights.errors import BrokenCheckpointError, UnsupportedBaseError
from finetune_trainer.weights.headers import INDEX_FILE, Checkpoint, TensorHeader, encode_header, read_header, read_json
from finetune_trainer.weights.rounding import TORCH_DTYPES
from finetune_trainer.weights.stored import StoredModel

BLOCK_BYTES = 16 << 20
"""Number of bytes to copy or sum at a time."""
_RESIZED_BIAS = "final_logits_bias"


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a model that have a row for each token."""

    tensors: Mapping[str, TensorHeader]
    """Tensors by their names in the files."""
    num_rows: int
    embedding: str
    """Last part of the input embedding's path, which is PEFT's name for the module."""
    head: str
    """Last part of the output head's path."""
    separate_head: str | None
    """Last part of the output head's path if the head does not share the embedding's values, or None."""


def vocabulary_of(model: StoredModel, *, saved_whole: Collection[str] | None) -> Vocabulary:
    """Find the tensors that have a row for each token.

    saved_whole: names of modules that an adapter saves whole (it saves only rows of others); None: there is no adapter.
    Raises UnsupportedBaseError if rows cannot be added.
    """
    parameters = model.vocabulary()
    sources = set(model.family.ties.values()) - set(model.family.ties)
    embedding = next((path for path in sorted(sources) if path in parameters), None)
    if embedding is None or len(parameters[embedding].parts) != 1:
        raise UnsupportedBaseError("the files hold no input embedding with a known name")
    for path, parameter in model.parameters.items():
        if path in model.embeddings and path not in parameters:
            counts = f"{path} has {parameter.shape[0]} rows and {embedding} {parameters[embedding].shape[0]}"
            raise UnsupportedBaseError(f"{counts}, so added tokens would have different ids in the two")
        if path.rpartition(".")[2] == _RESIZED_BIAS:
            raise UnsupportedBaseError(f"{path} has a value for each token, but belongs to neither embedding nor output head")
    for path, parameter in parameters.items():
        module, _, name = path.rpartition(".")
        is_held = saved_whole is None or any(f".{module}".endswith(f".{saved}") for saved in saved_whole)
        if name == "bias" and not is_held:
            raise UnsupportedBaseError(
                f"{path} has a value for each token, and an adapter holds the values of added tokens only if modulesToSave names "
                f"{module.rpartition('.')[2]}"
            )
        if 0 in parameter.shape:
            raise UnsupportedBaseError(f"{path} holds no value")
        if parameter.dtype not in TORCH_DTYPES:
            raise UnsupportedBaseError(f"{path} has the element type {parameter.dtype}, for which no mean can be computed")
    heads = [path for path in model.family.ties if path.endswith(".weight")]
    separate = [path for path in heads if path in parameters and model.tie(path) is None]
    return Vocabulary(
        tensors={part.header.name: part.header for parameter in parameters.values() for part in parameter.parts},
        num_rows=parameters[embedding].shape[0],
        embedding=_module(embedding),
        head=_module(separate[0] if separate else heads[-1]),
        separate_head=_module(separate[0]) if separate else None,
    )


def _module(path: str) -> str:
    return path.removesuffix(".weight").rpartition(".")[2]


def written_bytes(checkpoint: Checkpoint, vocabulary: Vocabulary, num_rows: int, directory: Path) -> int:
    """Return how many bytes the copy takes in the existing `directory`. Unchanged files on its file system become links."""
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

    root: directory that the model's links must not leave. num_known: number of tokens before any were added; the mean is taken
    over their rows. added: ids of added tokens, whose rows become the mean, as do all rows beyond the model's own. Raises
    BrokenCheckpointError, OSError.
    """
    changed = {header.file.name for header in vocabulary.tensors.values()}
    for name in checkpoint.file_bytes:
        with open_within(checkpoint.directory / name, root) as source:
            if name in changed:
                tensors = read_header(checkpoint.directory / name)
                grown = {tensor.name: (num_rows, *tensor.shape[1:]) for tensor in tensors if tensor.name in vocabulary.tensors}
                with (target / name).open("wb") as file:
                    file.write(_header(source, tensors, grown))
                    for tensor in tensors:
                        if tensor.name in grown:
                            _copy_with_rows(source, tensor, file, num_known=num_known, added=added, num_rows=num_rows)
                        else:
                            _copy(source, tensor, file)
            else:
                link_or_copy(source, target / name)
        sync_file(target / name)
    if (checkpoint.directory / INDEX_FILE).exists():
        index = read_json(checkpoint.directory / INDEX_FILE)
        grown_by = {header: num_rows - header.shape[0] for header in vocabulary.tensors.values()}
        more = {
            "total_size": sum(count * _row_bytes(header) for header, count in grown_by.items()),
            "total_parameters": sum(count * math.prod(header.shape[1:]) for header, count in grown_by.items()),
        }
        metadata = index.get("metadata")
        totals = metadata if isinstance(metadata, dict) else {}
        totals.update({name: totals[name] + count for name, count in more.items() if type(totals.get(name)) is int})
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        sync_file(target / INDEX_FILE)


def link_or_copy(source: BufferedReader, target: Path) -> None:
    """Hard-link the open file to `target`, or copy it if a link is impossible, for example across file systems."""
    descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The descriptor names the file, since the path may now lead elsewhere. Python follows the link in /proc only if it
        # gets a directory descriptor.
        os.link(str(source.fileno()), target, src_dir_fd=descriptors, follow_symlinks=True)
    except OSError:
        with target.open("wb") as copy:
            shutil.copyfileobj(source, copy, BLOCK_BYTES)
    finally:
        os.close(descriptors)


def _header(source: BufferedReader, tensors: Sequence[TensorHeader], grown: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return the header of a safetensors file with these tensors and the source's metadata. grown: new shapes by name."""
    source.seek(0)
    (length,) = struct.unpack("<Q", source.read(8))
    metadata = json.loads(source.read(length)).get("__metadata__")
    return encode_header(((tensor.name, tensor.dtype, grown.get(tensor.name, tensor.shape)) for tensor in tensors), metadata)


def _copy_with_rows(
    source: BufferedReader, tensor: TensorHeader, target: BufferedWriter, *, num_known: int, added: Collection[int], num_rows: int
) -> None:
    """Copy a tensor, with rows for added tokens."""
    total = torch.zeros(tensor.shape[1:], dtype=torch.float64)
    count = min(num_known, tensor.shape[0])
    for first, rows in _blocks(source, tensor):
        if first < count:
            total += rows[: count - first].double().sum(dim=0)
    mean = (total / max(count, 1)).to(TORCH_DTYPES[tensor.dtype])
    for first, rows in _blocks(source, tensor):
        for row in added:
            if 0 <= row - first < len(rows):
                rows[row - first] = mean
        target.write(_bytes(rows))
    target.writelines(_bytes(mean) for _ in range(tensor.shape[0], num_rows))


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
    """Yield blocks of consecutive rows, each with the number of its first row."""
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
    return BrokenCheckpointError(f"{tensor.file} ended inside tensor {tensor.name} while it was read. Fetch it again.")
