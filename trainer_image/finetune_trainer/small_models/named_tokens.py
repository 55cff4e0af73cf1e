"""Tokens that a job names: a small model must have a row for each."""

from __future__ import annotations

from finetune_job.plan.run_plan import MethodPlan

TOKENS_FIELD = "tokenIndices"
"""Setting of methods that train rows of an embedding."""


def named_tokens(method: MethodPlan) -> list[int]:
    """Token ids that the method trains."""
    if method.lora is not None:
        return list(method.lora.trainable_token_indices)
    found = method.adapter.settings.get(TOKENS_FIELD, []) if method.adapter is not None else []
    return [token for token in found if type(token) is int] if isinstance(found, list) else []
