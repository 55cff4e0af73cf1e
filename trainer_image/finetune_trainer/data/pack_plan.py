"""Documents of weighted data sets -> the sequences of one pass, window by window, in memory that does not grow with the data.

A record with index i of a data set with weight w occurs floor((i+1)*w) - floor(i*w) times in a pass: evenly spread, and the same
everywhere. A window takes every n-th document of all, so that each window holds of every data set and of every part of a file what
its share is, and a sequence mixes them; which sequences make a step, the permutation of each epoch decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.data.pack import one_document_each, pack

Array = NDArray[Any]

WINDOW_OCCURRENCES = 1 << 20
"""Documents packed together. Beyond some ten thousand, more fill a sequence no better."""
BLOCK_DOCUMENTS = 1 << 18
"""Looked at together while those of a window are sought."""
WEIGHT_UNIT = 1_000_000
"""Weights count to a millionth, so that their arithmetic is exact in 64 bits: indices below 9e10 times weights up to 100."""


@dataclass(frozen=True)
class WeightedDocuments:
    """The documents of one data set: `count` of them, which follow those of the data sets before it."""

    count: int
    weight: float

    @property
    def occurrences(self) -> int:
        """In one pass, of all of them together."""
        return self.count * _units(self.weight) // WEIGHT_UNIT


def occurrences(weight: float, indices: Array) -> Array:
    """How often the records with these indices occur in one pass. int64, of the shape of `indices`."""
    units = _units(weight)
    counts: Array = (indices + 1) * units // WEIGHT_UNIT - indices * units // WEIGHT_UNIT
    return counts


class DocumentCounts(Protocol):
    """What is known of each document, wherever it lies."""

    def counts(self, documents: Array) -> tuple[Array, Array]:
        """Tokens and supervised tokens of each of these documents, int64; their numbers rise."""
        ...


@dataclass(frozen=True)
class PlanWindow:
    """Some sequences: document numbers int64, the exclusive end of each sequence among them, and its supervised tokens."""

    sequence_documents: Array
    sequence_ends: Array
    supervised_tokens: Array
    num_tokens: int
    """Of all sequences together."""

    @classmethod
    def of(cls, documents: Array, sequence_ends: Array, tokens: Array, supervised: Array) -> PlanWindow:
        """tokens, supervised: counts of each of the documents, of which there is at least one."""
        of_sequences = np.add.reduceat(supervised, np.concatenate([[0], sequence_ends[:-1]]))
        return cls(documents, sequence_ends, of_sequences, int(tokens.sum()))


def plan_windows(
    data_sets: Sequence[WeightedDocuments],
    table: DocumentCounts,
    max_sequence_length: int,
    packing: bool,
    window_occurrences: int = WINDOW_OCCURRENCES,
) -> Iterator[PlanWindow]:
    """Sequences that hold every occurrence of every document of `table` once."""
    stride = max(-(-sum(each.occurrences for each in data_sets) // window_occurrences), 1)
    for offset in range(stride):
        documents, times = _window_documents(data_sets, offset, stride)
        if not len(documents):
            continue
        tokens, supervised = table.counts(documents)
        # All, then all that occur again, and so on: packing keeps this order among equal lengths and so puts copies of one document
        # into different sequences where it can.
        places = np.concatenate([np.flatnonzero(times > number) for number in range(int(times.max()))])
        if packing:
            order, ends = pack(tokens[places], max_sequence_length)
            places = places[order]
        else:
            _, ends = one_document_each(len(places))
        yield PlanWindow.of(documents[places], ends, tokens[places], supervised[places])


def _window_documents(data_sets: Sequence[WeightedDocuments], offset: int, stride: int) -> tuple[Array, Array]:
    """Those of every `stride`-th document that occur in a pass at all, and how often. Looked at in blocks, because a small weight
    leaves few of many.
    """
    found, times, first = [], [], 0
    for each in data_sets:
        stop = first + each.count
        for start in range(first + (offset - first) % stride, stop, stride * BLOCK_DOCUMENTS):
            documents = np.arange(start, min(start + stride * BLOCK_DOCUMENTS, stop), stride)
            counts = occurrences(each.weight, documents - first)
            found.append(documents[counts > 0])
            times.append(counts[counts > 0])
        first = stop
    nothing = np.empty(0, dtype=np.int64)
    return np.concatenate([nothing, *found]), np.concatenate([nothing, *times])


def _units(weight: float) -> int:
    return round(weight * WEIGHT_UNIT)
