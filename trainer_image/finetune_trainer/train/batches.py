"""Which sequences a rank sees in a micro-step."""

from __future__ import annotations

from finetune_trainer.data.permutation import position


def global_batch(step: int, global_batch_size: int, seed: int, num_sequences: int) -> list[int]:
    """The sequences of optimizer step `step`: the next ones of the endless sequence of permuted epochs, whatever the world size."""
    places = range(step * global_batch_size, (step + 1) * global_batch_size)
    return [position(seed, place // num_sequences, place % num_sequences, num_sequences) for place in places]


def micro_batch(sequences: list[int], micro_step: int, rank: int, world_size: int, micro_batch_size: int) -> list[int]:
    """This rank's part of a global batch in micro-step `micro_step`."""
    start = (micro_step * world_size + rank) * micro_batch_size
    return sequences[start : start + micro_batch_size]
