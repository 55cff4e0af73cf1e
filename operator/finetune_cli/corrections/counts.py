"""Numbers of sequences and ranks that a pasted spec gives under the names of other tools, in whichever part of it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from finetune_cli.corrections.wrong_field import letters

MICRO_BATCH = ("microbatchsize", "perdevicetrainbatchsize", "perdevicebatchsize", "microbatch")
PROCESSES = ("processespernode", "numgpus", "gpus", "gpuspernode", "nprocpernode", "numgpuspernode", "ngpus", "devices")
NODES = ("nodes", "numnodes", "nnodes", "nummachines", "workers")
STEPS = ("maxsteps", "steps", "numsteps", "maxtrainsteps", "trainsteps", "numtrainingsteps")
EPOCHS = ("epochs", "numtrainepochs", "numepochs", "maxepochs", "epoch")
TOTALS = ("globalbatchsize", "numprocesses", "worldsize", "numranks")
"""Of sequences and of ranks; of ranks tools differ, some mean those of one node."""
MOST_COUNTED = 1_000_000


def counts_of(spec: Mapping[str, Any], names: Container[str]) -> list[int | None]:
    """The numbers under all of their names; None for one that is not understood."""
    return [count(value) for value in values_of(spec, names)]


def values_of(written: Any, names: Container[str]) -> Iterator[Any]:
    """What is written under these names, in whichever part of a spec: settings are pasted anywhere."""
    for name, value in written.items() if isinstance(written, Mapping) else ():
        if isinstance(value, Mapping):
            yield from values_of(value, names)
        elif value is not None and letters(str(name)) in names:
            yield value


def count(value: Any) -> int | None:
    """A whole number above 0, in quotes or not."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return None
    return int(number) if 0 < number <= MOST_COUNTED and number == int(number) else None


def is_at_most_0(value: Any) -> bool:
    """Whether a number is written, in quotes or not, that counts nothing."""
    try:
        return isinstance(value, int | float | str) and not isinstance(value, bool) and float(value) <= 0
    except (ValueError, OverflowError):
        return False
