"""Packed against unpacked: the same documents in shared rows and each in a row of its own give the same step.

float32 must agree within 1e-6, relative L2 per tensor. bfloat16 keeps 8 bits and the two sum attention in another order: measured
on this model up to 9.5e-3 in a gradient; the bound stands at about twice that.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune_trainer.data.batches import Batch, PreparedData
from finetune_trainer.objective.next_token import NextToken
from tests.support.tiny_model import write_tiny_llama, write_tiny_prepared
from tests.unit.finetune_trainer.train.recorded_steps import distance

BOUNDS = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (1e-3, 2e-2)}
"""Of the loss and of each gradient, relative."""
CPU = torch.device("cpu")
PAD = 256
"""Stands in no document of the tiny data."""


def apart(batch: Batch) -> list[Batch]:
    """Each document as a batch of its own, with positions from 0 whatever the packed ones are."""
    found = []
    row = start = 0
    for length in batch.document_lengths:
        if batch.input_ids.shape[1] - start < length or batch.input_ids[row, start] == PAD:
            row, start = row + 1, 0
        ids, labels = (each[row : row + 1, start : start + length] for each in (batch.input_ids, batch.labels))
        found.append(Batch(ids, labels, torch.arange(length)[None], int((labels != -100).sum()), (length,)))
        start += length
    return found


@pytest.mark.parametrize("dtype", BOUNDS)
def test_packed_and_unpacked_give_the_same_loss_and_gradients(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = write_tiny_llama(tmp_path / "model")
    write_tiny_prepared(tmp_path / "prepared")
    data = PreparedData.open(tmp_path / "prepared").train
    batch = data.batch(range(4))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").train()
    objective = NextToken()
    objective.install(model)
    losses, gradients = [], []
    for batches in ([batch], apart(batch)):
        loss = torch.zeros(())
        for each in batches:
            part = objective.weighted_loss(model, each, 1 / batch.num_supervised_tokens, CPU, None)
            part.backward()
            loss += part.detach()
        losses.append(loss.item())
        gradients.append({name: parameter.grad.float().clone() for name, parameter in model.named_parameters()})
        model.zero_grad()
    assert len(apart(batch)) > 4
    loss_bound, gradient_bound = BOUNDS[dtype]
    assert losses[0] == pytest.approx(losses[1], rel=loss_bound)
    for name, gradient in gradients[0].items():
        assert distance(gradient, gradients[1][name]) <= gradient_bound, name
