"""The loss in the output layer against torch's own on whole logits, and a second objective through the same step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from finetune_trainer.data.batches import Batch, PreparedData, PreparedSplit
from finetune_trainer.data.shards import SplitArrays
from finetune_trainer.model.objective import BatchSize
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.train.batches import global_batch
from tests.support.tiny_model import plan_of, run_context, tiny_spec
from tests.unit.finetune_trainer.train.recorded_steps import distance, recorded_steps

CPU = torch.device("cpu")
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def test_size_counts_tokens_and_squares_of_documents() -> None:
    """Padding, here of the second row, is in neither."""
    lengths = [[3, 2], [4]]
    ends = np.cumsum([length for row in lengths for length in row])
    arrays = SplitArrays(np.arange(9), np.ones(9, dtype=bool), ends, np.array([2, 3]), np.array([5, 4]))
    batch = PreparedSplit.of(arrays, 0).batch([0, 1])
    assert batch.input_ids.numel() > 9
    assert NextToken().size(batch) == BatchSize(9, 9 + 4 + 16)


@dataclass(frozen=True)
class Pairs:
    """Preferred and rejected answers, stood in for by neighbouring sequences: pair n is sequences 2n and 2n + 1."""

    data: PreparedSplit

    @property
    def num_sequences(self) -> int:
        return self.data.num_sequences // 2

    def batch(self, indices: Sequence[int]) -> Batch:
        return self.data.batch([place for index in indices for place in (2 * index, 2 * index + 1)])


class Preference:
    """-log sigmoid of how much likelier the first of two sequences is: what preference tuning is, without its reference model."""

    def install(self, model: nn.Module) -> None:
        pass

    def num_terms(self, data: Pairs, sequences: Sequence[int]) -> int:
        return len(sequences)

    def size(self, batch: Batch) -> BatchSize:
        return BatchSize(batch.input_ids.numel(), 0)

    def weighted_loss(
        self, model: nn.Module, batch: Batch, weight: float, device: torch.device, autocast: torch.dtype | None
    ) -> torch.Tensor:
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        return weight * pair_loss(logits, batch.labels).sum()


def pair_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scores = -functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none").sum(1)
    return -functional.logsigmoid(0.1 * (scores[::2] - scores[1::2]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_objective_runs_through_the_same_step(tmp_path: Path, world_size: int) -> None:
    training = {"globalBatchSize": 4, "microBatchSize": 1, "maxGradNorm": "0"}
    spec = tiny_spec(method={"type": "Full", "lora": None}, training=training, parallelism={"processesPerNode": world_size})
    context = run_context(tmp_path, spec)
    ((loss, gradients),) = recorded_steps(context, tmp_path, 1, 0.1, Preference(), Pairs)
    model = AutoModelForCausalLM.from_pretrained(context.base_model, dtype=torch.float32).train()
    pairs = Pairs(PreparedData.open(context.workspace.prepared).train)
    plan = plan_of(spec)
    wanted = torch.zeros(())
    for pair in global_batch(0, 4, plan.training.seed, pairs.num_sequences):
        batch = pairs.batch([pair])
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        wanted = wanted + pair_loss(logits, batch.labels).sum() / 4
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert distance(gradients[name], parameter.grad.flatten()) < 1e-6, name
