"""Checks that the base with added tokens was made from the base that the job names. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from finetune_trainer.added_tokens import AddedTokens
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import Checkpoint, TensorHeader, read_checkpoint

_BLOCK_BYTES = 16 << 20


def source_difference(source: Path, made: Path, added: AddedTokens) -> str | None:
    """Describe how the weights in `made` differ from those in `source`, apart from added rows; None if they do not differ.

    The rows of added tokens are not compared, since they belong to no token of the source. Raises OSError.
    """
    try:
        expected, actual = read_checkpoint(source), read_checkpoint(made)
    except MergeError as error:
        return f"cannot be read ({error})"
    if expected.tensors.keys() != actual.tensors.keys():
        return f"holds different tensors from the base in {source}, from which it was made"
    name = next((name for name in expected.tensors if not _is_kept(expected, actual, name, added)), None)
    return None if name is None else f"holds values of {name} that differ from the base in {source}, from which it was made"


def _is_kept(expected: Checkpoint, actual: Checkpoint, name: str, added: AddedTokens) -> bool:
    before, after = expected.tensors[name], actual.tensors[name]
    has_rows_of_tokens = after.shape[:1] == (added.num_rows,)
    is_as_long = before.shape[:1] == after.shape[:1] or (has_rows_of_tokens and before.shape[:1] < after.shape[:1])
    if before.dtype != after.dtype or before.shape[1:] != after.shape[1:] or not is_as_long:
        return False
    if os.path.samestat(before.file.stat(), after.file.stat()):  # both paths lead to the same file
        return True
    left_out = added.ids if has_rows_of_tokens else ()
    return all(_is_same(before, after, start, end) for start, end in _kept_spans(before, left_out))


def _kept_spans(tensor: TensorHeader, left_out: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a tensor, leaving out the rows `left_out`."""
    if not left_out or not tensor.num_bytes:
        yield 0, tensor.num_bytes
        return
    width, start = tensor.num_bytes // tensor.shape[0], 0
    for row in sorted(row for row in left_out if row < tensor.shape[0]):
        yield start, row * width
        start = (row + 1) * width
    yield start, tensor.num_bytes


def _is_same(before: TensorHeader, after: TensorHeader, start: int, end: int) -> bool:
    with before.file.open("rb") as first, after.file.open("rb") as second:
        first.seek(before.offset + start)
        second.seek(after.offset + start)
        for at in range(start, end, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, end - at)
            if first.read(size) != second.read(size):
                return False
    return True
