"""Checks whether a model's attention can be computed from document bounds instead of a mask (model/variable_length.py).

Some models are ruled out by their configuration. For the others, a small model of the same architecture is measured, because no
list of architectures can say what a model's code requires of its attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from finetune_job.api.inputs import Attention
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import ATTENTION_FIELD
from finetune_memory.choices import NOT_FUSED, UNKNOWN, varlen_problem
from finetune_memory.model_shape import UnknownModelError, facts_of
from finetune_trainer.model import packed_documents, variable_length
from finetune_trainer.model.load import stored_dtype
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.small_model import FIRST, LEAK_TOLERANCE, SECOND, spread
from finetune_trainer.weights.rounding import dtype_name


def check_variable_length(seen: ModelInspection) -> Iterator[Finding]:
    """Fills in `attention_problem`. Yields a finding if the user asked for this attention and it is not possible."""
    if seen.plan.model.attention is not Attention.VARLEN and not seen.plan.leaves_attention_open:
        return
    seen.attention_problem = _problem(seen)
    if seen.attention_problem and not seen.plan.leaves_attention_open:
        yield make_finding(
            "attention-not-supported",
            field=ATTENTION_FIELD,
            value=Attention.VARLEN.value,
            message=f"attention cannot be computed from the bounds of documents: {seen.attention_problem}",
            fix=f"remove {ATTENTION_FIELD} so that one is chosen that works with the model",
            changes={ATTENTION_FIELD: None},
        )


def _problem(seen: ModelInspection) -> str:
    base = seen.base
    if not getattr(base, "_supports_sdpa", False):
        return NOT_FUSED
    try:
        facts = facts_of(base.config.to_dict(), has_fused_attention=True)
    except UnknownModelError:
        return UNKNOWN
    stored = dtype_name(stored_dtype(seen.directory))
    problem = varlen_problem(seen.plan, facts, stored)
    if problem or (seen.plan.model.attention is Attention.VARLEN and seen.observed is None):
        return problem
    return "no small model of this architecture could be run" if seen.observed is None else measured_problem(seen.observed.model)


def measured_problem(model: PreTrainedModel) -> str:
    """Returns why the architecture's code cannot use bounds; empty if packed documents then have the same logits as with a mask.

    Changes the weights. model: a small model of the architecture, in float32.
    """
    spread(model)
    packed_documents.install_document_masks(model)
    model.eval()
    size = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.arange(FIRST + SECOND)[None] * 3 % size
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
    try:
        with torch.no_grad(), packed_documents.documents_apart(positions):
            masked = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            with variable_length.installed(model):
                bounds = variable_length.document_bounds(positions, torch.device("cpu"))
                unmasked = model(input_ids=tokens, position_ids=positions, use_cache=False, **bounds).logits
    except Exception as error:  # noqa: BLE001 - code of any model
        return f"its code fails with it: {type(error).__name__}: {str(error)[:200]}"
    difference = float((unmasked - masked).abs().max() / masked.abs().max().clamp(min=1))
    return (
        "" if difference <= LEAK_TOLERANCE else f"logits of a small model of this architecture change by {difference:.2g} with it"
    )
