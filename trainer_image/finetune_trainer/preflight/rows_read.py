"""Trained rows of the input embedding whose tokens no record holds, or that pad: they get no gradient, and stay what they are.

Where an output head shares the rows, every prediction gives them one. Reads the tokens of the training split once.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from finetune_job.api.method import MethodType
from finetune_job.catalogue.book import make_finding
from finetune_job.plan.run_plan import MethodPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.data.shards import TRAIN, TokenShards, map_tables
from finetune_trainer.preflight.job_inspection import JobInspection

_AT_A_TIME = 1 << 20


def check_rows_read(seen: JobInspection) -> list[Finding]:
    """At most one finding."""
    plan, padding_row = seen.plan, seen.known_structure.padding_row
    prepared = seen.known_data.readable_at(seen.context.workspace.prepared)
    field, written = _trained_rows(plan.method)
    unread = sorted(set(written) - (_read_tokens(prepared, written) - {padding_row}))
    if not unread:
        return []
    first = unread[0]
    reason = (
        f"token {first} is the model's padding (pad_token_id in config.json), whose row torch leaves out"
        if first == padding_row
        else f"no training record has token {first} before its last one"
    )
    is_all = plan.method.type is MethodType.TRAINABLE_TOKENS and len(unread) == len(set(written))
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


def _trained_rows(method: MethodPlan) -> tuple[str, list[int]]:
    """The setting and its ids."""
    if method.adapter is not None:
        return "spec.method.settings.tokenIndices", list(method.adapter.settings.get("tokenIndices") or ())
    return "spec.method.lora.trainableTokenIndices", list(method.lora.trainable_token_indices) if method.lora is not None else []


def _read_tokens(prepared: Path, wanted: Collection[int]) -> set[int]:
    """Those of the wanted tokens that some other token of the same record follows: the last one of a record predicts nothing."""
    ends = map_tables(prepared, TRAIN).document_ends
    shards = TokenShards(prepared, TRAIN)
    found: set[int] = set()
    num_tokens = int(ends[-1]) if len(ends) else 0
    for start in range(0, num_tokens, _AT_A_TIME):
        stop = min(start + _AT_A_TIME, num_tokens)
        tokens = shards.read(start, stop)[0].copy()
        # Ends are positions behind the last token.
        inside = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, stop, side="right")]
        tokens[np.asarray(inside) - 1 - start] = -1
        found |= set(np.intersect1d(tokens, list(wanted)).tolist())
        if found.issuperset(wanted):
            break
    return found
