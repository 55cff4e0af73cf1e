"""Tokens that every chat holds and that the base model has never learnt: their rows of the embedding are zeros, or equal.

Base models ship tokens for chats whose rows nobody trained; adapters of other layers cannot tell them apart. Reads the rows of
these few tokens and no other weight.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune_job.api.data import DataFormat
from finetune_job.catalogue.book import make_finding
from finetune_job.plan.run_plan import LoraPlan, RunPlan
from finetune_job.rules.rule import Finding
from finetune_job.rules.tokens import EMBEDDINGS, SAVED, TOKENS
from finetune_trainer.data.chat import PROBE, ChatError, Tokenizer, chat_template, template_source
from finetune_trainer.files import open_regular
from finetune_trainer.inspection.model_structure import ModelStructure
from finetune_trainer.preflight.job_inspection import JobInspection
from finetune_trainer.processes.sandbox import EndedError, confined
from finetune_trainer.weights.headers import DTYPE_BYTES, TensorHeader, read_checkpoint

log = logging.getLogger(__name__)


def check_token_rows(seen: JobInspection) -> list[Finding]:
    """At most one finding; none where the template does not end, which is said of the records."""
    plan, tokenizer, structure = seen.plan, seen.tokenizer, seen.known_structure
    directory = seen.context.base_model
    if plan.data.format is not DataFormat.CHAT:
        return []
    try:
        return confined(lambda: _untrained(plan, tokenizer, structure, directory))
    except EndedError as error:
        log.warning("rows of the template's tokens are not looked at: %s", error)
        return []


def _untrained(plan: RunPlan, tokenizer: Tokenizer, structure: ModelStructure, directory: Path) -> list[Finding]:
    try:
        text = chat_template(tokenizer, template_source(tokenizer, plan.data.chat_template)).render(PROBE)
    except ChatError:
        return []  # said already
    tokens = special_tokens(tokenizer, text)
    found: dict[str, list[int]] = {}
    for header in _vocabularies(structure, directory):
        rows = _rows(header, [number for number in tokens if number < header.shape[0]])
        wrong = [number for number, row in rows.items() if not any(row) or list(rows.values()).count(row) > 1]
        if wrong:
            found[header.name] = wrong
    if not found:
        return []
    name, wrong = next(iter(found.items()))
    return [
        make_finding(
            "chat-token-untrained",
            field="spec.model.source",
            value=str(wrong[0]),
            message=f"the template writes {', '.join(repr(tokens[number]) for number in wrong[:4])}, whose rows of {name} hold "
            "zeros or equal each other: the base has never learnt them, and this job trains no row of it",
            fix=f"set spec.method.lora.trainableTokenIndices to {wrong}, name embeddings and lm_head in "
            "spec.method.lora.modulesToSave, or use a chatTemplate of tokens that the base knows",
            changes=_trained(plan.method.lora, found),
        )
    ]


def _trained(lora: LoraPlan | None, untrained: Mapping[str, list[int]]) -> dict[str, Any]:
    """What has them trained: of an embedding alone these rows, of a head all of it, because PEFT trains rows of no head.

    untrained: numbers of rows by the tensor's name.
    """
    if lora is None:
        return {}
    modules = {name.removesuffix(".weight").rpartition(".")[2]: rows for name, rows in untrained.items()}
    if EMBEDDINGS.issuperset(modules):
        rows = {*lora.trainable_token_indices, *(row for each in modules.values() for row in each)}
        return {f"spec.{TOKENS}": sorted(rows)}
    return {f"spec.{SAVED}": [*lora.modules_to_save, *sorted(modules)]}


def special_tokens(tokenizer: Tokenizer, text: str) -> dict[int, str]:
    """The added tokens of the tokenizer that a text holds, by their ids."""
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    ids = set(tokenizer(text, add_special_tokens=False)["input_ids"])
    return {number: content for number, content in sorted(added.items()) if number in ids}


def _vocabularies(structure: ModelStructure, directory: Path) -> list[TensorHeader]:
    """Tensors with a row per token of which the job trains nothing."""
    return [
        header
        for header in read_checkpoint(directory).tensors.values()
        if len(header.shape) == 2
        and header.shape[0] == structure.vocabulary_size
        and not any(f".{header.name.removesuffix('.weight')}." in f".{name}." for name in structure.trainable)
    ]


def _rows(header: TensorHeader, numbers: Sequence[int]) -> dict[int, bytes]:
    """Their bytes, by number."""
    length = header.shape[1] * DTYPE_BYTES[header.dtype]
    with open_regular(header.file) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        return {number: held[header.offset + number * length : header.offset + (number + 1) * length] for number in numbers}
