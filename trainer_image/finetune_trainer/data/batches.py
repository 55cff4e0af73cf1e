"""Turns prepared sequences into tensors. Reads only what a batch needs; the same indices give the same bytes on every machine.

Used by the training loop and by verification. A sequence consists of one or more whole documents. Invariants: positions restart
at 0 at each document of a row and at the row's padding; transformers' attention (sdpa and eager, without a mask) uses this to
keep documents apart. The first token of a document is never supervised, because the token before it belongs to another document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from finetune_memory.model_shape import LENGTH_MULTIPLE
from finetune_trainer.data.shards import (
    TRAIN,
    VALIDATION,
    SplitArrays,
    SplitTables,
    TokenShards,
    map_tables,
    read_manifest,
    verify_files,
)

IGNORED_LABEL = -100
"""Label of tokens that are not supervised; transformers and torch's cross_entropy ignore this value."""


@dataclass(frozen=True)
class Batch:
    """The int64 tensors of a batch, each [B, T]. `labels[b, t]` is `input_ids[b, t]` or `IGNORED_LABEL`; labels are not shifted.

    Call the model with `input_ids`, `position_ids` and `use_cache=False`, and without an attention mask: transformers detects
    packed documents only if there is neither a mask nor a cache.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    num_supervised_tokens: int
    document_lengths: tuple[int, ...]
    """Number of tokens of each document, without padding."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start copying a host tensor to `device`, without waiting for the copy.

    Copies to a GPU are asynchronous only from pinned memory.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PreparedSplit:
    """The sequences of one split."""

    def __init__(self, tables: SplitTables, tokens: SplitArrays | TokenShards, pad_token_id: int, least_length: int = 1) -> None:
        """least_length: shorter rows are padded to this length."""
        self._tables = tables
        self._tokens = tokens
        self._pad_token_id = pad_token_id
        self._least_length = least_length

    @classmethod
    def of(cls, arrays: SplitArrays, pad_token_id: int) -> PreparedSplit:
        """Make a split from arrays in memory."""
        return cls(arrays.tables, arrays, pad_token_id)

    @classmethod
    def open_held_out(cls, directory: Path) -> PreparedSplit | None:
        """Open only the held-out records; returns None if there are none. Raises PreparedDataError like `PreparedData.open`."""
        manifest = read_manifest(directory)
        if VALIDATION not in manifest["splits"]:
            return None
        files = {name: entry for name, entry in manifest["files"].items() if name.startswith(f"{VALIDATION}/")}
        verify_files(directory, {"files": files})
        return cls(map_tables(directory, VALIDATION), TokenShards(directory, VALIDATION), int(manifest["pad_token_id"]))

    @property
    def num_sequences(self) -> int:
        return len(self._tables.sequence_ends)

    @property
    def num_documents(self) -> int:
        """Number of distinct documents. If a data set's weight is above 1, several sequences may hold the same document."""
        return len(self._tables.document_ends)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents, each counted once."""
        return int(self._tables.document_ends[-1])

    @property
    def num_supervised_tokens(self) -> int:
        """Number of supervised tokens in all sequences."""
        return int(self._tables.supervised_tokens.sum())

    def supervised_tokens(self, indices: Sequence[int]) -> int:
        """Return the total number of supervised tokens in these sequences, without reading the tokens themselves."""
        return int(sum(self._tables.supervised_tokens[index] for index in indices))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Make a batch of these sequences, in this order, padded to the longest. Raises IndexError for an unknown index."""
        rows = [self._bounds(index) for index in indices]
        longest = max(self._least_length, *(sum(stop - start for start, stop in bounds) for bounds in rows))
        shape = (len(rows), -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
        input_ids = np.full(shape, self._pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        for row, bounds in enumerate(rows):
            filled = 0
            for start, stop in bounds:
                tokens, supervised = self._tokens.read(start, stop)
                place = slice(filled, filled + stop - start)
                input_ids[row, place] = tokens
                labels[row, place] = np.where(supervised, tokens, IGNORED_LABEL)
                position_ids[row, place] = np.arange(stop - start)
                filled = place.stop
            position_ids[row, filled:] = np.arange(shape[1] - filled)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(position_ids),
            num_supervised_tokens=self.supervised_tokens(indices),
            document_lengths=tuple(stop - start for bounds in rows for start, stop in bounds),
        )

    def document(self, index: int) -> list[int]:
        """Token ids of one document. Raises IndexError."""
        return self.marked_document(index)[0]

    def marked_document(self, index: int) -> tuple[list[int], list[bool]]:
        """Token ids of one document, and for each token whether the loss counts its prediction. Raises IndexError."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} is not in 0..{self.num_documents - 1}")
        tokens, supervised = self._tokens.read(*self._document_bounds(index))
        return tokens.tolist(), supervised.tolist()

    def _bounds(self, sequence: int) -> list[tuple[int, int]]:
        """Start and stop of each document of the sequence, as token offsets in the split."""
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"sequence {sequence} is not in 0..{self.num_sequences - 1}")
        ends = self._tables.sequence_ends
        first = int(ends[sequence - 1]) if sequence else 0
        documents = self._tables.sequence_documents[first : int(ends[sequence])]
        return [self._document_bounds(int(document)) for document in documents]

    def _document_bounds(self, document: int) -> tuple[int, int]:
        ends = self._tables.document_ends
        return int(ends[document - 1]) if document else 0, int(ends[document])


@dataclass(frozen=True)
class PreparedData:
    """Prepared data whose files have been verified."""

    train: PreparedSplit
    validation: PreparedSplit | None
    """The held-out data; None if the plan has none."""
    data_hash: str
    """Hexadecimal SHA-256 that covers all prepared files."""

    @classmethod
    def open(cls, directory: Path, least_length: int = 1) -> PreparedData:
        """Open the data under `directory`. Raises PreparedDataError if any byte has changed since it was written.

        least_length: shorter rows are padded to this length.
        """
        manifest = read_manifest(directory)
        verify_files(directory, manifest)
        pad_token_id = int(manifest["pad_token_id"])
        splits = {
            split: PreparedSplit(map_tables(directory, split), TokenShards(directory, split), pad_token_id, least_length)
            for split in manifest["splits"]
        }
        return cls(train=splits[TRAIN], validation=splits.get(VALIDATION), data_hash=manifest["data_hash"])

    def verification_prompts(self, n: int) -> list[list[int]]:
        """Token ids of up to `n` whole documents, spread evenly over the held-out data (if there is none: the training data)."""
        split = self.validation or self.train
        count = min(n, split.num_documents)
        return [split.document(number * split.num_documents // count) for number in range(count)]
