"""Rows of tokens that a job adds to its base model, before the tokenizer has been read.

As many rows as there are tokens: models whose embeddings have rows to spare need fewer, which only preflight knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from finetune_job.added_rows import AddedRows, with_added_rows_trained
from finetune_job.module_names import OUTPUT_HEADS, TOKEN_EMBEDDINGS
from finetune_job.plan.method_plan import MethodPlan
from finetune_memory.model_shape import ParameterShape


def with_added_rows(base: Sequence[ParameterShape], num_rows: int, num_added: int) -> tuple[ParameterShape, ...]:
    """The base's parameters with embeddings that have `num_added` more than `num_rows` rows."""
    return tuple(
        replace(each, shape=(num_rows + num_added, *each.shape[1:])) if _has_row_per_token(each, num_rows) else each
        for each in base
    )


def _has_row_per_token(parameter: ParameterShape, num_rows: int) -> bool:
    is_head = parameter.module.rpartition(".")[2] in OUTPUT_HEADS
    return parameter.shape[:1] == (num_rows,) and (is_head or parameter.kind == "embedding")


def with_trained_rows(method: MethodPlan, base: Sequence[ParameterShape], num_rows: int, num_added: int) -> MethodPlan:
    """The method that trains the rows of added tokens as the trainer will have it."""
    ends = [each.module.rpartition(".")[2] for each in base]
    embedding = next((end for end in ends if end in TOKEN_EMBEDDINGS), None)
    if embedding is None or not num_added:
        return method
    head = next((end for end in ends if end in OUTPUT_HEADS), None)
    ids = tuple(range(num_rows, num_rows + num_added))
    added = AddedRows(ids, embedding, head or OUTPUT_HEADS[0], has_separate_head=head is not None)
    return with_added_rows_trained(method, added)
