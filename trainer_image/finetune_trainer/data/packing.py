"""Packs documents of weighted data sets into the sequences of one pass, using memory that does not grow with the data.

A record with index i of a data set with weight w occurs floor((i+1)*w) - floor(i*w) times in a pass. Documents are packed window
by window, best fit decreasing: the longest first, each into the fullest sequence that still has room for it. Documents of equal
length keep the given order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from finetune_trainer.data.records import WEIGHT_UNIT, occurrences, weight_units

Array = NDArray[Any]

WINDOW_OCCURRENCES = 1 << 20
"""Number of document occurrences that are packed together. More than about ten thousand would not make sequences fuller."""
BLOCK_DOCUMENTS = 1 << 18
"""Number of documents examined at a time when the documents of a window are selected."""


@dataclass(frozen=True)
class WeightedDocuments:
    """The `count` documents of one data set. Document numbers continue from the previous data set."""

    count: int
    weight: float

    @property
    def occurrences(self) -> int:
        """Total number of times that these documents occur in one pass."""
        return self.count * weight_units(self.weight) // WEIGHT_UNIT


@dataclass(frozen=True)
class PlanWindow:
    """Sequences: their document numbers, the exclusive end of each sequence in that list, and its number of supervised tokens."""

    sequence_documents: Array
    sequence_ends: Array
    supervised_tokens: Array
    num_tokens: int
    """Total number of tokens in the sequences."""

    @classmethod
    def of(cls, documents: Array, sequence_ends: Array, tokens: Array, supervised: Array) -> PlanWindow:
        """tokens, supervised: counts for each document. There must be at least one document."""
        of_sequences = np.add.reduceat(supervised, np.concatenate([[0], sequence_ends[:-1]]))
        return cls(documents, sequence_ends, of_sequences, int(tokens.sum()))


def plan_windows(
    data_sets: Sequence[WeightedDocuments],
    counts: Callable[[Array], tuple[Array, Array]],
    max_sequence_length: int,
    packing: bool,
    window_occurrences: int = WINDOW_OCCURRENCES,
) -> Iterator[PlanWindow]:
    """Yield windows of sequences that together hold every occurrence of every document once.

    counts: takes ascending document numbers and returns each document's numbers of tokens and of supervised tokens, int64.
    """
    stride = max(-(-sum(data_set.occurrences for data_set in data_sets) // window_occurrences), 1)
    for offset in range(stride):
        documents, times = _window_documents(data_sets, offset, stride)
        if not len(documents):
            continue
        tokens, supervised = counts(documents)
        # All first occurrences of documents, then all second ones, and so on. Packing keeps this order among equal lengths, so
        # copies of a document go into different sequences where possible.
        places = np.concatenate([np.flatnonzero(times > number) for number in range(int(times.max()))])
        if packing:
            order, ends = pack(tokens[places], max_sequence_length)
            places = places[order]
        else:
            _, ends = one_document_each(len(places))
        yield PlanWindow.of(documents[places], ends, tokens[places], supervised[places])


def _window_documents(data_sets: Sequence[WeightedDocuments], offset: int, stride: int) -> tuple[Array, Array]:
    """Select every `stride`-th document from `offset` on that occurs in a pass. Return document numbers and occurrences.

    Documents are examined in blocks: with a small weight only few of them occur, and the others need not all be in memory.
    """
    documents_of_blocks, times, first = [], [], 0
    for data_set in data_sets:
        stop = first + data_set.count
        for start in range(first + (offset - first) % stride, stop, stride * BLOCK_DOCUMENTS):
            documents = np.arange(start, min(start + stride * BLOCK_DOCUMENTS, stop), stride)
            counts = occurrences(data_set.weight, documents - first)
            documents_of_blocks.append(documents[counts > 0])
            times.append(counts[counts > 0])
        first = stop
    nothing = np.empty(0, dtype=np.int64)
    return np.concatenate([nothing, *documents_of_blocks]), np.concatenate([nothing, *times])


def pack(lengths: ArrayLike, max_sequence_length: int) -> tuple[Array, Array]:
    """Return (documents, sequence_ends): document numbers, sequence after sequence, int64 [num_documents], and the exclusive end
    of each sequence in them, int64 [num_sequences]. Each document is in one sequence; none exceeds the limit (in tokens).

    Documents keep the given order within a sequence, and sequences are ordered by their first document. Raises ValueError for a
    length that is not in 1..max_sequence_length.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    wrong = np.flatnonzero((sizes < 1) | (sizes > max_sequence_length))
    if len(wrong):
        raise ValueError(f"document {wrong[0]} has {sizes[wrong[0]]} tokens; it must have 1..{max_sequence_length}")
    longest_first = np.argsort(-sizes, kind="stable")
    sequence_of = np.empty(len(sizes), dtype=np.int64)
    placed = 0
    for sequences in _placements(sizes[longest_first], max_sequence_length):
        sequence_of[longest_first[placed : placed + len(sequences)]] = sequences
        placed += len(sequences)
    return _in_order(sequence_of)


def one_document_each(num_documents: int) -> tuple[Array, Array]:
    """Return sequences of one document each, in the form that `pack` returns."""
    return np.arange(num_documents), np.arange(1, num_documents + 1)


def _placements(sizes: Array, limit: int) -> Iterator[Array]:
    """Place documents of descending sizes. Yields arrays with each document's sequence, numbered in the order of opening."""
    open_by_room: dict[int, list[Array]] = {}
    rooms = num_sequences = 0
    # Bit r of `rooms` is set if a sequence has room for exactly r tokens. The tightest fit is the lowest bit from `length` up.
    values, first = np.unique(-sizes, return_index=True)
    for value, count in zip(values.tolist(), np.diff(first, append=len(sizes)).tolist(), strict=True):
        length = -value
        while count:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                sequences = open_by_room[room].pop()
            else:
                room = limit
                sequences = np.arange(num_sequences, num_sequences + -(-count // (limit // length)))
                num_sequences += len(sequences)
            num_per_sequence = room // length
            used = min(len(sequences), -(-count // num_per_sequence))
            if used < len(sequences):
                open_by_room.setdefault(room, []).append(sequences[used:])
            if open_by_room.get(room):
                rooms |= 1 << room
            else:
                rooms &= ~(1 << room)
            taken = min(count, used * num_per_sequence)
            yield np.repeat(sequences[:used], num_per_sequence)[:taken]
            count -= taken
            # The last sequence may have taken fewer documents than the others.
            in_last = taken - (used - 1) * num_per_sequence
            for group, num_documents in ((sequences[: used - 1], num_per_sequence), (sequences[used - 1 : used], in_last)):
                if len(group):
                    room_left = room - num_documents * length
                    open_by_room.setdefault(room_left, []).append(group)
                    rooms |= 1 << room_left


def _in_order(sequence_of: Array) -> tuple[Array, Array]:
    """Sort documents by sequence, and sequences by their first document."""
    documents = np.argsort(sequence_of, kind="stable")
    if not len(documents):
        return documents, documents
    starts = np.flatnonzero(np.diff(sequence_of[documents], prepend=-1))
    place = np.empty(len(starts), dtype=np.int64)
    place[np.argsort(documents[starts])] = np.arange(len(starts))
    places = place[sequence_of]
    return np.argsort(places, kind="stable"), np.cumsum(np.bincount(places))
