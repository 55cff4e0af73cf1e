"""Makes a method train the rows of added tokens. Used by the trainer, which knows the token ids, and by the memory planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import MethodType
from finetune_job.method_settings import TARGETS, TRAINED_ROWS_SETTING
from finetune_job.plan.method_plan import LoraPlan, MethodPlan


@dataclass(frozen=True)
class AddedRows:
    """The added tokens, and the modules that have a row for each of them: the embedding and the output head."""

    ids: tuple[int, ...]
    embedding: str
    """Last component of the embedding's module path."""
    head: str
    """Last component of the output head's module path."""
    has_separate_head: bool
    """Whether the output head has its own weights rather than sharing those of the embedding."""


def with_added_rows_trained(method: MethodPlan, added: AddedRows) -> MethodPlan:
    """Return the method, changed so that it also trains these rows of the embedding and output head, unless it already does."""
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
    """Return the LoRA settings that train the rows. PEFT cannot train single rows of a module that it adapts or trains whole."""
    taken = {name.rpartition(".")[2] for name in (*lora.modules_to_save, *lora.target_modules)}
    of_embedding = lora.trainable_token_indices
    # If the head shares the embedding's weights, PEFT trains the rows of both together.
    together = {added.embedding} if added.has_separate_head else {added.embedding, added.head}
    if taken.isdisjoint(together):
        of_embedding = tuple(sorted({*of_embedding, *added.ids}))
    rows: dict[str, Any] = {"trainable_token_indices": of_embedding}
    if added.has_separate_head and added.head not in taken:
        by_module = {added.embedding: of_embedding, added.head: tuple(sorted(added.ids))}
        rows["separate_token_rows"] = {name: each for name, each in by_module.items() if each}
    return rows
