"""The loss of a step against a plain computation, document by document, without any of the packing or splitting."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from finetune_job.plan.run_plan import TrainingPlan
from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.errors import NonFiniteError
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.observe.steps import StepResult
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train.batches import global_batch
from finetune_trainer.train.optimizers import build_optimizer
from finetune_trainer.train.step import StepBatches, StepInputs, held_out_loss, optimizer_step
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama, write_tiny_prepared

ALONE = Gang(0, 1, 0, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    directory = tmp_path_factory.mktemp("data") / "prepared"
    write_tiny_prepared(directory)
    return PreparedData.open(directory)


def load(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").train()


def documents_of(data: PreparedData, sequence: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels of each document of a training sequence, cut apart where positions start again."""
    batch = data.train.batch([sequence])
    starts = [number for number, place in enumerate(batch.position_ids[0].tolist()) if place == 0] + [batch.input_ids.shape[1]]
    return [(batch.input_ids[0, a:b], batch.labels[0, a:b]) for a, b in pairwise(starts)]


def plain_sum_and_count(model: torch.nn.Module, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    total, count = torch.zeros(()), 0
    for tokens, labels in documents:
        if len(tokens) > 1 and bool((labels[1:] != -100).any()):
            logits = model(input_ids=tokens[None]).logits[0]
            total = total + functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
    return total, count


def first_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: PreparedData,
    training: TrainingPlan,
    *,
    learning_rate: float,
    loss_scale: float = 1.0,
) -> StepResult:
    """Of one rank, in the type that the model has."""
    inputs = StepInputs(model, NextToken(), StepBatches(data.train, training, ALONE), training, ALONE, autocast=None)
    return optimizer_step(inputs, optimizer, step=0, learning_rate=learning_rate, stop_requested=False, loss_scale=loss_scale)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_loss_and_gradient_are_means_over_the_supervised_tokens_of_the_step(
    model_directory: Path, data: PreparedData, micro_batch_size: int
) -> None:
    plan = plan_of(tiny_spec(parallelism={"processesPerNode": 1}, training={"microBatchSize": micro_batch_size}))
    training = plan.training
    reference = load(model_directory)
    sequences = global_batch(0, training.global_batch_size, training.seed, data.train.num_sequences)
    total, count = plain_sum_and_count(
        reference, [document for sequence in sequences for document in documents_of(data, sequence)]
    )
    (total / count).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in reference.parameters()]).norm()
    model = load(model_directory)
    result = first_step(model, build_optimizer(pieces(model), plan), data, training, learning_rate=0.0)
    assert result.supervised_tokens == count == data.train.supervised_tokens(sequences)
    assert result.loss == pytest.approx(float(total.detach()) / count, rel=1e-5)
    assert result.gradient_norm == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("max_grad_norm", ["0", "0.01", "1000"])
def test_the_factor_of_the_loss_changes_neither_norm_nor_clip_nor_weights(
    model_directory: Path, data: PreparedData, max_grad_norm: str
) -> None:
    plan = plan_of(tiny_spec(parallelism={"processesPerNode": 1}, training={"maxGradNorm": max_grad_norm}))
    training = plan.training
    found = []
    for factor in (1.0, 2.0**10):
        model = load(model_directory)
        # Its update is proportional to the gradient: one that was clipped wrong would be seen.
        optimizer = torch.optim.SGD([{"params": list(model.parameters()), "learning_rate_scale": 1.0}], lr=1.0)
        result = first_step(model, optimizer, data, training, learning_rate=1.0, loss_scale=factor)
        assert result.loss_scale == factor
        found.append((result.loss, result.gradient_norm, [parameter.detach().clone() for parameter in model.parameters()]))
    (loss, norm, weights), (scaled_loss, scaled_norm, scaled_weights) = found
    assert (scaled_loss, scaled_norm) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-6))
    moved = torch.cat([(new - old).flatten() for new, old in zip(weights, load(model_directory).parameters(), strict=True)])
    limit = float(max_grad_norm)
    assert float(moved.detach().norm()) == pytest.approx(min(norm, limit) if limit else norm, rel=1e-3)
    for one, other in zip(weights, scaled_weights, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


def test_held_out_loss_is_the_mean_over_supervised_tokens(model_directory: Path, data: PreparedData) -> None:
    model = load(model_directory)
    assert data.validation is not None
    as_train = PreparedData(train=data.validation, validation=None, data_hash="")
    documents = [document for sequence in range(data.validation.num_sequences) for document in documents_of(as_train, sequence)]
    total, count = plain_sum_and_count(model, documents)
    for micro_batch_size in (1, 3):
        assert held_out_loss(model, NextToken(), data.validation, micro_batch_size, gang=ALONE, autocast=None) == pytest.approx(
            float(total.detach()) / count, rel=1e-5
        )
    assert model.training


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_changing_one_document_changes_no_logit_of_another(model_directory: Path, data: PreparedData, attention: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation=attention).train()
    sequence = next(number for number in range(data.train.num_sequences) if len(documents_of(data, number)) >= 3)
    batch = data.train.batch([sequence, sequence])
    second = int((batch.position_ids[0] == 0).nonzero()[1])
    changed = batch.input_ids.clone()
    changed[:, :second] = (changed[:, :second] + 1) % 256
    with torch.no_grad():
        before = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        after = model(input_ids=changed, position_ids=batch.position_ids, use_cache=False).logits
    assert torch.equal(before[:, second:], after[:, second:])
    assert not torch.equal(before[:, :second], after[:, :second])


def test_a_loss_that_is_not_finite_stops_before_a_weight_changes(model_directory: Path, data: PreparedData) -> None:
    plan = plan_of(tiny_spec(parallelism={"processesPerNode": 1}))
    training = plan.training
    model = load(model_directory)
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(NonFiniteError, match="step 1") as caught:
        first_step(model, build_optimizer(pieces(model), plan), data, training, learning_rate=1.0)
    assert caught.value.step == 1
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
