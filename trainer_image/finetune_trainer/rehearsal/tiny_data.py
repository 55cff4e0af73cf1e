"""Prepared data for a twin: random tokens in the shape that the plan asks for; every named token occurs in every document."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from finetune_job.api.data import LossOn
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.data.shards import TRAIN, VALIDATION, SplitArrays
from finetune_trainer.rehearsal.twin_plan import STEPS

SHORTEST, LONGEST = 6, 16
"""Tokens of a document."""
DOCUMENTS_PER_SEQUENCE = 3
HELD_OUT = 4
_NAMED_PER_DOCUMENT = 2


def tiny_splits(plan: RunPlan, vocabulary: int, avoided: Collection[int], named: Collection[int]) -> dict[str, SplitArrays]:
    """`vocabulary`: rows of the embedding; `avoided`: tokens that stand for more than text; `named`: tokens that the job trains."""
    allowed = np.array(sorted(set(range(min(vocabulary, 1 << 16))) - set(avoided)) or [0])
    random = np.random.default_rng(plan.training.seed)
    splits = {TRAIN: _split(plan, STEPS * plan.training.global_batch_size, allowed, sorted(named), random)}
    if plan.data.validation is not None:
        splits[VALIDATION] = _split(plan, HELD_OUT, allowed, sorted(named), random)
    return splits


def _split(plan: RunPlan, num_sequences: int, allowed: np.ndarray, named: list[int], random: np.random.Generator) -> SplitArrays:
    longest = max(2, min(LONGEST, plan.data.max_sequence_length))
    tokens: list[int] = []
    supervised: list[bool] = []
    document_ends, sequence_ends, supervised_tokens = [], [], []
    # The first is never supervised, because the token before it is another document's.
    skipped = 1 if plan.data.loss_on is LossOn.ALL else 2
    for _ in range(num_sequences):
        start = len(supervised)
        left = plan.data.max_sequence_length
        for _ in range(int(random.integers(1, DOCUMENTS_PER_SEQUENCE + 1)) if plan.data.packing else 1):
            length = min(int(random.integers(min(SHORTEST, longest), longest + 1)), left)
            if length < 2:
                break
            left -= length
            document = random.choice(allowed, length)
            for number in range(min(_NAMED_PER_DOCUMENT if named else 0, length - 1)):
                document[number] = named[int(random.integers(len(named)))]
            tokens += [int(token) for token in document]
            supervised += [number >= min(skipped, length - 1) for number in range(length)]
            document_ends.append(len(tokens))
        sequence_ends.append(len(document_ends))
        supervised_tokens.append(sum(supervised[start:]))
    return SplitArrays(
        np.array(tokens), np.array(supervised), np.array(document_ends), np.array(sequence_ends), np.array(supervised_tokens)
    )
