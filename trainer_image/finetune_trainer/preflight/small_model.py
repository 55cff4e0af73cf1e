"""Runs a small model of the same architecture to find out what no model declares: whether tokens see later tokens, and whether
packed documents see each other.

Positions that start again with each document separate documents if the model's code makes its masks from them
(model/packed_documents.py). Not all code does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.model import packed_documents
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.task import FIELD, SUPPORTED

log = logging.getLogger(__name__)
FIRST, SECOND = 9, 7
"""Number of tokens of each of the two packed documents."""
TOKENS = 12
"""Number of tokens of the text with which causality is measured."""
LEAK_TOLERANCE = 1e-4
"""Largest accepted change of a logit, in float32. Leaks cause 0.01 or more, a different order of sums below 1e-6 (measured)."""


def check_small_model(seen: ModelInspection) -> list[Finding]:
    """Returns the findings; none if the model's code fails, since the rehearsal reports this. Changes the model's weights."""
    if seen.observed is None or seen.is_refused:
        return []
    model = seen.observed.model
    spread(model)
    model.eval()
    checks: list[Callable[[PreTrainedModel], Finding | None]] = [_check_causality]
    if seen.plan.data.packing:
        checks.append(_check_packing)
    findings = []
    for check in checks:
        try:
            findings.append(check(model))
        except Exception as error:  # noqa: BLE001 - code of any model
            log.warning("%s fails on a small model of this architecture: %s: %s", check.__name__, type(error).__name__, error)
    return [finding for finding in findings if finding is not None]


@torch.no_grad()
def spread(model: PreTrainedModel) -> None:
    """Scales each matrix so that products keep their size: with small initial weights, attention has hardly any effect."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            scale = parameter.std() * parameter.shape[-1] ** 0.5
            parameter.div_(scale.clamp(min=1e-6))


def _check_causality(model: PreTrainedModel) -> Finding | None:
    """Reports a model whose logits change if a later token is replaced."""
    size = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.arange(TOKENS) * 3 % size
    other = tokens.clone()
    other[-1] = (tokens[-1] + 1) % size
    logits = []
    for text in (tokens, other):
        torch.manual_seed(0)  # for attention that samples which tokens it attends to
        with torch.no_grad():
            logits.append(model(input_ids=text[None], use_cache=False).logits[0, :-1].float())
    change = _change(*logits)
    if change <= LEAK_TOLERANCE:
        return None
    name = type(model).__name__
    return make_finding(
        "model-not-causal",
        field=FIELD,
        value=name,
        message=f"{name} is not a causal model: its logits change by {change:.2g} with tokens that come later (measured on a "
        "small model of this architecture), so it would learn to copy what it is to predict",
        fix=f"{SUPPORTED}; an encoder needs is_decoder: true to be a decoder",
    )


def _check_packing(model: PreTrainedModel) -> Finding | None:
    """Reports a model whose logits of a document change with the document before it in the sequence."""
    packed_documents.install_document_masks(model)
    size = int(model.get_input_embeddings().weight.shape[0])
    first, second = torch.arange(FIRST) % size, (torch.arange(SECOND) * 3 + 1) % size
    logits = []
    for documents in ((second,), (first, second)):
        # The trainer computes logits in this way: without a mask, with positions that start again with each document.
        positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
        with torch.no_grad(), packed_documents.documents_apart(positions):
            computed = model(input_ids=torch.cat(documents)[None], position_ids=positions, use_cache=False).logits
        logits.append(computed[0, -SECOND:].float())
    change = _change(*logits)
    if change <= LEAK_TOLERANCE:
        return None
    return make_finding(
        "packing-leaks",
        field="spec.data.packing",
        value="true",
        message=f"{type(model).__name__} does not separate packed documents: logits of one change by {change:.2g} with the one "
        "before it in the sequence (measured on a small model of this architecture)",
        fix="set spec.data.packing: false",
        changes={"spec.data.packing": False},
    )


def _change(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest logit."""
    return float((others - logits).abs().max() / logits.abs().max().clamp(min=1))
