"""Runs a small model of the same architecture to find out what no model declares: whether tokens see later tokens, and whether
the logits of a document change with other documents in its row or in its micro-batch.

Positions that start again with each document separate documents if the model's code makes its masks from them
(model/packed_documents.py). Not all code does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import MICRO_BATCH_FIELD
from finetune_trainer.model import packed_documents
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.task import FIELD, SUPPORTED

log = logging.getLogger(__name__)
FIRST, SECOND = 10, 6
"""Numbers of tokens of two documents. The first alone is longer than LOW_THRESHOLD; the second, placed after the first, crosses a
multiple of LOW_THRESHOLD."""
TOKENS = 12
"""Number of tokens of the text with which causality is measured."""
LOSS_TOLERANCE = 2e-5
"""Maximum accepted relative difference between two computations of a loss in float32. Less than 1e-6 was measured."""
LEAK_TOLERANCE = 1e-4
"""Maximum accepted change of a logit in float32. Leaks cause 0.01 or more; another order of sums, less than 1e-6 (measured)."""


def check_small_model(seen: ModelInspection) -> list[Finding]:
    """Returns the findings; none if the model's code fails, since the rehearsal reports this. Changes the model's weights."""
    if seen.observed is None or seen.is_refused:
        return []
    model = seen.observed.model
    spread(model)
    model.eval()
    packed_documents.install_document_masks(model)
    packed_documents.install_rope_by_document(model)
    checks: list[Callable[[PreTrainedModel], Finding | None]] = [_check_causality, _check_own_loss]
    if seen.plan.data.packing:
        checks.append(_check_packing)
    if seen.plan.training.micro_batch_size > 1 or seen.plan.leaves_open(MICRO_BATCH_FIELD):
        checks.append(_check_micro_batch)
    findings = []
    for check in checks:
        try:
            finding = check(model)
        except Exception as error:  # noqa: BLE001 - code of any model
            log.warning("%s fails on a small model of this architecture: %s: %s", check.__name__, type(error).__name__, error)
            continue
        if finding is not None:
            findings.append(finding)
            if check is _check_causality:
                # The other checks would report the same, because later tokens include those of other documents.
                break
    return findings


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
    first, second = _documents(model)
    change = _change(_logits_of_second(model, [second]), _logits_of_second(model, [first, second]))
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


def _check_micro_batch(model: PreTrainedModel) -> Finding | None:
    """Reports a model whose logits of a document change with a longer one in another row of the micro-batch."""
    first, second = _documents(model)
    change = _change(_logits_of_second(model, [second]), _logits_of_second(model, [second], [first]))
    if change <= LEAK_TOLERANCE:
        return None
    return make_finding(
        "micro-batch-leaks",
        field=MICRO_BATCH_FIELD,
        value="more than 1",
        message=f"{type(model).__name__} computes a record by the longest one of its micro-batch: logits change by {change:.2g} "
        "(measured on a small model of this architecture)",
        fix=f"set {MICRO_BATCH_FIELD}: 1",
        changes={MICRO_BATCH_FIELD: 1},
    )


def _check_own_loss(model: PreTrainedModel) -> Finding | None:
    """Reports a model whose own loss is not the cross-entropy of its logits, which is the loss that the trainer uses."""
    size = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.arange(TOKENS)[None] * 3 % size
    with torch.no_grad():
        output = model(input_ids=tokens, position_ids=torch.arange(TOKENS)[None], labels=tokens, use_cache=False)
    logits, own = output.logits[0].float(), float(output.loss)
    # The causal classes of encoder-decoders expect labels that are already shifted.
    losses = [float(cross_entropy(logits[: TOKENS - shift], tokens[0, shift:])) for shift in (1, 0)]
    if any(math.isclose(own, loss, rel_tol=LOSS_TOLERANCE) for loss in losses):
        return None
    return make_finding(
        "loss-of-the-model-unused",
        field=FIELD,
        value=type(model).__name__,
        message=f"{type(model).__name__} adds a term to its loss, such as one that balances experts (output_router_logits): "
        f"{own:.4g} where the cross-entropy is {losses[0]:.4g} (measured on a small model of this architecture). The training "
        "leaves this term out",
        fix="nothing needs to change if next tokens alone are to be learnt; output_router_logits: false in config.json says so",
    )


def _documents(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    size = int(model.get_input_embeddings().weight.shape[0])
    return torch.arange(FIRST) % size, (torch.arange(SECOND) * 3 + 1) % size


@torch.no_grad()
def _logits_of_second(model: PreTrainedModel, *rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the logits of the last document of the first row.

    The trainer computes logits in this way: without a mask, with positions that start again with each document and with padding.
    """
    lengths = [sum(map(len, row)) for row in rows]
    padded = [[*row, torch.zeros(max(lengths) - length, dtype=torch.long)] for row, length in zip(rows, lengths, strict=True)]
    positions = torch.stack([torch.cat([torch.arange(len(part)) for part in row]) for row in padded])
    with packed_documents.documents_apart(positions):
        logits: torch.Tensor = model(
            input_ids=torch.stack([torch.cat(row) for row in padded]), position_ids=positions, use_cache=False
        ).logits
    return logits[0, lengths[0] - SECOND : lengths[0]].float()


def _change(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest logit."""
    return float((others - logits).abs().max() / logits.abs().max().clamp(min=1))
