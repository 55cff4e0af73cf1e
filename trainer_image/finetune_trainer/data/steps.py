"""Relates training sequences to the steps of a run: chooses a global batch that is left open, and reports too few sequences.

Called by preflight with the prepared data, and by roles/look.py if the first records are all records. It does not import numpy.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import GLOBAL_BATCH_FIELD, MICRO_BATCH_FIELD, Choice, RunPlan
from finetune_trainer.data.records import occurrences

FEW_STEPS = 20
"""A run with fewer steps is reported if packing has more than halved their number."""


def total_steps(epochs: int | None, max_steps: int | None, num_sequences: int, global_batch_size: int) -> int:
    """Number of optimizer steps of a run. If the last step is not full, it is filled with sequences of the next epoch."""
    if max_steps is not None:
        return max_steps
    return math.ceil((epochs or 0) * num_sequences / global_batch_size)


def fit_batch(plan: RunPlan, num_sequences: int, made: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Add the global batch to `made` if the plan leaves it open, and reduce a chosen micro-batch to divide a rank's share."""
    if not plan.leaves_open(GLOBAL_BATCH_FIELD):
        return made
    usual, reason = plan.training.global_batch_size, "the usual one"
    if num_sequences < usual:
        reason = f"the data make {num_sequences} sequences, fewer than the usual {usual}"
    # If there are too few sequences for any batch, `check_steps` reports it.
    batch = min(usual, _largest_batch(plan, num_sequences)) or usual
    micro, share = plan.with_choices(made).training.micro_batch_size, batch // plan.parallelism.world_size
    fitting = next(size for size in range(micro, 0, -1) if share % size == 0)
    others = (choice.model_copy(update={"value": fitting}) if choice.field == MICRO_BATCH_FIELD else choice for choice in made)
    return (Choice(field=GLOBAL_BATCH_FIELD, value=batch, reason=reason), *others)


def check_steps(plan: RunPlan, num_sequences: int, num_occurrences: int) -> Iterator[Finding]:
    """Report training data that cannot fill a step, or that packing reduces to only a few steps."""
    training, largest = plan.training, _largest_batch(plan, num_sequences)
    usual = batch = training.global_batch_size
    is_open = plan.leaves_open(GLOBAL_BATCH_FIELD)
    if is_open and largest:
        batch = min(usual, largest)
    of_records = min(usual, _largest_batch(plan, num_occurrences)) if is_open else usual
    made = f"{num_occurrences} records make {num_sequences} sequence{'' if num_sequences == 1 else 's'}"
    if num_sequences < batch:
        ways = [f"set {GLOBAL_BATCH_FIELD} to {largest}"] if largest else []
        if plan.data.packing and num_occurrences >= of_records > 0:
            ways.append(f"set spec.data.packing: false, which gives {num_occurrences} sequences")
        yield make_finding(
            "fewer-sequences-than-batch",
            field=GLOBAL_BATCH_FIELD,
            value=str(batch),
            message=f"{made}, fewer than one step takes: a step would count some of them twice",
            fix=", or ".join([*ways, "give more records"]),
        )
        return
    steps = total_steps(training.epochs, None, num_sequences, batch)
    unpacked = total_steps(training.epochs, None, num_occurrences, of_records or batch)
    if 0 < steps < FEW_STEPS and 2 * steps < unpacked:
        yield make_finding(
            "packing-leaves-few-steps",
            field="spec.data.packing",
            value="true",
            message=f"{made}, so the run has {steps} step{'' if steps == 1 else 's'} with a batch of {batch}; without packing it "
            f"would have {unpacked}",
            fix="set spec.data.packing: false, as in tools that count records, or give more epochs"
            + (f", or lower {GLOBAL_BATCH_FIELD}" if batch > plan.batch_unit else ""),
        )


def _largest_batch(plan: RunPlan, num_sequences: int) -> int:
    """The largest global batch that the sequences can fill and the ranks can share equally; 0 if there is none."""
    return num_sequences // plan.batch_unit * plan.batch_unit


def check_lengths(plan: RunPlan, lengths: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Run `check_steps` on the lengths of all kept records. lengths: field of a data set -> number of tokens of each record."""
    occurring = [
        length
        for dataset in plan.data.train
        for index, length in enumerate(lengths[dataset.field])
        for _ in range(occurrences(dataset.weight, index))
    ]
    packed = _num_packed(occurring, plan.data.max_sequence_length) if plan.data.packing else len(occurring)
    return check_steps(plan, packed, len(occurring))


def _num_packed(lengths: Sequence[int], limit: int) -> int:
    """The number of sequences that packing.py would make (best fit decreasing), computed without numpy."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        tightest = bisect_left(rooms, length)
        insort(rooms, (rooms.pop(tightest) if tightest < len(rooms) else limit) - length)
    return len(rooms)
