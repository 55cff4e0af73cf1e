"""The rows of added tokens that a method trains; used by the trainer, which knows their ids, and by the memory planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import MethodType
from finetune_job.method_settings import TARGETS, TRAINED_ROWS_SETTING
from finetune_job.plan.method_plan import LoraPlan, MethodPlan


@dataclass(frozen=True)
class AddedRows:
    """The rows of added tokens in the embeddings and in the output head."""

    ids: tuple[int, ...]
    embedding: str
    """Last name in the path of the embeddings' module."""
    head: str
    """Last name in the path of the output head's module."""
    has_separate_head: bool
    """Whether the head has its own rows instead of those of the embeddings."""


def with_added_rows_trained(method: MethodPlan, added: AddedRows) -> MethodPlan:
    """Return the method that trains these rows of embeddings and output head, unless something else trains them."""
    if method.lora is not None:
        return method.model_copy(update={"lora": method.lora.model_copy(update=_rows_of_lora(method.lora, added))})
    if method.adapter is None or method.type is not MethodType.TRAINABLE_TOKENS:
        return method
    settings = dict(method.adapter.settings)
    settings[TRAINED_ROWS_SETTING] = sorted({*(settings.get(TRAINED_ROWS_SETTING) or ()), *added.ids})
    if added.has_separate_head:
        settings.setdefault(TARGETS, [added.embedding, added.head])
    return method.model_copy(update={"adapter": method.adapter.model_copy(update={"settings": settings})})


def _rows_of_lora(lora: LoraPlan, added: AddedRows) -> dict[str, Any]:
    """Return the settings that train rows: PEFT cannot train rows of a module that it adapts or trains whole."""
    taken = {name.rpartition(".")[2] for name in (*lora.modules_to_save, *lora.target_modules)}
    of_embedding = lora.trainable_token_indices
    # If the head shares the embedding's values, PEFT trains its rows together with the embedding's.
    together = {added.embedding} if added.has_separate_head else {added.embedding, added.head}
    if taken.isdisjoint(together):
        of_embedding = tuple(sorted({*of_embedding, *added.ids}))
    rows: dict[str, Any] = {"trainable_token_indices": of_embedding}
    if added.has_separate_head and added.head not in taken:
        by_module = {added.embedding: of_embedding, added.head: tuple(sorted(added.ids))}
        rows["separate_token_rows"] = {name: each for name, each in by_module.items() if each}
    return rows
