"""Reports rows of the embedding that chats need but the base never learnt, and trained rows that no record uses."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune_job.api.inputs import DataFormat
from finetune_job.api.method import MethodType
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.module_names import TOKEN_EMBEDDINGS
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.tokens import SAVED, TOKENS
from finetune_trainer.data.render_chat import ChatError, Tokenizer, template_source
from finetune_trainer.data.shards import TRAIN, TokenShards, map_tables
from finetune_trainer.data.template_probe import PROBE, arguments_key, chat_template
from finetune_trainer.files import open_regular
from finetune_trainer.inspection.report import ModelStructure
from finetune_trainer.preflight.inspection import Inspection
from finetune_trainer.processes.sandbox import SandboxEndedError, run_sandboxed
from finetune_trainer.weights.headers import DTYPE_BYTES, TensorHeader, read_checkpoint

log = logging.getLogger(__name__)
_BLOCK_TOKENS = 1 << 20
"""Number of tokens of the data that are searched at a time."""


def check_token_rows(seen: Inspection) -> list[Finding]:
    """Reports rows of the chat template's tokens that the base never learnt. Other checks report a template that never ends."""
    plan, tokenizer, structure = seen.plan, seen.tokenizer, seen.structure
    directory = seen.context.base_model
    if tokenizer is None or structure is None or plan.data.format is not DataFormat.CHAT:
        return []
    try:
        return run_sandboxed(lambda: _untrained(plan, tokenizer, structure, directory))
    except SandboxEndedError as error:
        log.warning("rows of the template's tokens are not checked: %s", error)
        return []


def _untrained(plan: RunPlan, tokenizer: Tokenizer, structure: ModelStructure, directory: Path) -> list[Finding]:
    try:
        text = chat_template(
            tokenizer, template_source(tokenizer, plan.data.chat_template), (), arguments_key(plan.data.template_arguments)
        ).render(PROBE)
    except ChatError:
        return []  # another check has reported this
    tokens = special_tokens(tokenizer, text)
    untrained: dict[str, list[int]] = {}
    for header in _vocabularies(structure, directory):
        rows = _rows(header, [number for number in tokens if number < header.shape[0]])
        wrong = [number for number, row in rows.items() if not any(row) or list(rows.values()).count(row) > 1]
        if wrong:
            untrained[header.name] = wrong
    if not untrained:
        return []
    name, wrong = next(iter(untrained.items()))
    first = f"set spec.method.lora.trainableTokenIndices to {wrong}, " if plan.parallelism.fsdp.version == 2 else ""
    return [
        make_finding(
            "chat-token-untrained",
            field="spec.model.source",
            value=str(wrong[0]),
            message=f"the template writes {', '.join(repr(tokens[number]) for number in wrong[:4])}, whose rows of {name} hold "
            "zeros or equal each other: the base has never learnt them, and this job trains no row of it",
            fix=f"{first}name embeddings and lm_head in spec.method.lora.modulesToSave, or use a chatTemplate of tokens that the "
            "base knows",
            changes=_trained(plan, untrained),
        )
    ]


def _trained(plan: RunPlan, untrained: Mapping[str, list[int]]) -> dict[str, Any]:
    """Returns the changes that train these rows. PEFT trains single rows of an embedding, but a head only as a whole.

    FSDP 1 does not support training of single rows (the rule fsdp1-trainable-tokens), so it trains the whole embedding.
    untrained: tensor's name -> numbers of rows.
    """
    lora = plan.method.lora
    if lora is None:
        return {}
    modules = {name.removesuffix(".weight").rpartition(".")[2]: rows for name, rows in untrained.items()}
    if TOKEN_EMBEDDINGS.issuperset(modules) and plan.parallelism.fsdp.version == 2:
        rows = {*lora.trainable_token_indices, *(row for numbers in modules.values() for row in numbers)}
        return {f"spec.{TOKENS}": sorted(rows)}
    return {f"spec.{SAVED}": [*lora.modules_to_save, *sorted(modules)]}


def special_tokens(tokenizer: Tokenizer, text: str) -> dict[int, str]:
    """Returns the tokenizer's added tokens that occur in `text`, as a mapping from id to token text."""
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    ids = set(tokenizer(text, add_special_tokens=False)["input_ids"])
    return {number: content for number, content in sorted(added.items()) if number in ids}


def _vocabularies(structure: ModelStructure, directory: Path) -> list[TensorHeader]:
    """Returns the stored tensors that have a row for each token and that the job does not train."""
    return [
        header
        for header in read_checkpoint(directory).tensors.values()
        if len(header.shape) == 2
        and header.shape[0] == structure.vocabulary_size
        and not any(f".{header.name.removesuffix('.weight')}." in f".{name}." for name in structure.trainable)
    ]


def _rows(header: TensorHeader, numbers: Sequence[int]) -> dict[int, bytes]:
    """Returns a mapping from the number of each of these rows to its bytes."""
    length = header.shape[1] * DTYPE_BYTES[header.dtype]
    with open_regular(header.file) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return {number: mapped[header.offset + number * length : header.offset + (number + 1) * length] for number in numbers}


def check_trained_rows(seen: Inspection) -> list[Finding]:
    """Reports trained rows that no training record uses, if the output head does not share them."""
    plan, structure = seen.plan, seen.structure
    if structure is None or not structure.trains_input_rows_alone or not seen.is_writable:
        return []
    prepared = seen.training_data()
    if prepared is None:
        return []
    padding_row = structure.padding_row
    if plan.method.adapter is not None:
        field, written = "spec.method.settings.tokenIndices", plan.method.adapter.settings.get("tokenIndices") or ()
    else:
        field = "spec.method.lora.trainableTokenIndices"
        written = () if plan.method.lora is None else plan.method.lora.trainable_token_indices
    # added_tokens.py checks the job's added tokens.
    written = [token for token in written if seen.added is None or token not in seen.added.ids]
    unread = sorted(set(written) - (found_tokens(prepared, written, before_others=True) - {padding_row}))
    if not unread:
        return []
    first = unread[0]
    reason = (
        f"token {first} is the model's padding (pad_token_id in config.json), whose row torch leaves out"
        if first == padding_row
        else f"no training record has token {first} before its last token"
    )
    is_all = plan.method.type is MethodType.TRAINABLE_TOKENS and len(unread) == len(set(written)) and seen.added is None
    left = [token for token in written if token not in unread]
    nothing = "; nothing else is trained, so nothing would be learnt" if is_all else ""
    return [
        make_finding(
            "trained-token-unread",
            severity="error" if is_all else "warning",
            field=field,
            value=str(first),
            message=f"{reason}, and the output head does not share the embedding: this row gets no gradient "
            f"({len(unread)} such ids){nothing}",
            fix="name ids of tokens that the records hold, or add records that hold these",
            changes=None if is_all else {field: left or None},
        )
    ]


def found_tokens(prepared: Path, wanted: Collection[int], *, before_others: bool = False) -> set[int]:
    """Returns those wanted tokens that occur in training records.

    before_others: whether to ignore the last token of each record, from which nothing is predicted.
    """
    ends = map_tables(prepared, TRAIN).document_ends
    shards = TokenShards(prepared, TRAIN)
    present: set[int] = set()
    num_tokens = int(ends[-1]) if len(ends) else 0
    for start in range(0, num_tokens, _BLOCK_TOKENS):
        stop = min(start + _BLOCK_TOKENS, num_tokens)
        tokens = shards.read(start, stop)[0].copy()
        if before_others:
            # An end is the position after a document's last token.
            inside = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, stop, side="right")]
            tokens[np.asarray(inside) - 1 - start] = -1
        present |= set(np.intersect1d(tokens, list(wanted)).tolist())
        if present.issuperset(wanted):
            break
    return present
