"""The loss in the output layer against torch's own on whole logits, and a second objective through the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from finetune_memory.loss import MIN_ROWS_PER_PART, VALUES_PER_PART
from finetune_trainer.data.batches import Batch, PreparedData, PreparedSplit
from finetune_trainer.data.shards import SplitArrays
from finetune_trainer.model.objective import BatchSize
from finetune_trainer.objective import cross_entropy, head
from finetune_trainer.objective.next_token import NextToken, targets_of
from finetune_trainer.train.batches import global_batch
from tests.support.tiny_model import plan_of, run_context, tiny_spec
from tests.unit.trainer_train.recorded_steps import distance, recorded_steps

CPU = torch.device("cpu")
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
SMALL_KV = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts for little data."""
    monkeypatch.setitem(VALUES_PER_PART, "cpu", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_parts_give_the_loss_and_the_gradients_of_whole_logits(dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    num_rows, vocabulary, factor = 3 * MIN_ROWS_PER_PART + 7, 301, 0.37
    hidden = torch.randn(2, num_rows, 24).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 24).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary).to(dtype).requires_grad_() if with_bias else None
    labels = torch.randint(0, vocabulary, (2, num_rows))
    labels[:, ::3] = -100
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    targets = targets_of(labels, factor, CPU)
    logits = functional.linear(hidden.flatten(0, 1)[targets.rows], weight, bias)
    plain = functional.cross_entropy(logits.float(), targets.labels, reduction="sum") * factor
    wanted = torch.autograd.grad(plain, leaves)
    found = cross_entropy.cross_entropy_of_linear(hidden, weight, bias, targets, dtype)
    gradients = torch.autograd.grad(found, leaves)
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(plain.item(), rel=1e-6)
    assert torch.equal(gradients[0], wanted[0]), "the gradient of the hidden states is the same, bit for bit"
    # bfloat16 rounds the logits already.
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_logits = functional.linear(exact[0].flatten(0, 1)[targets.rows], *exact[1:])
    truths = torch.autograd.grad(functional.cross_entropy(exact_logits, targets.labels, reduction="sum") * factor, exact)
    bound = 1e-6 if dtype is torch.float32 else 1e-2
    for gradient, truth in zip(gradients, truths, strict=True):
        assert gradient.dtype is dtype
        assert distance(gradient.double(), truth) < bound
    with torch.no_grad():
        without = cross_entropy.cross_entropy_of_linear(hidden, weight, bias, targets, dtype)
    assert without.item() == pytest.approx(found.item(), rel=1e-7)


@pytest.mark.usefixtures("small_parts")
def test_the_gradient_of_a_16_bit_head_is_summed_in_float32() -> None:
    """Of many parts that each add little: a sum in bfloat16 would stop growing."""
    torch.manual_seed(0)
    num_rows = 64 * MIN_ROWS_PER_PART
    hidden = torch.randn(1, num_rows, 8, dtype=torch.bfloat16)
    weight = (torch.randn(5, 8) / 10).to(torch.bfloat16).requires_grad_()
    targets = targets_of(torch.zeros(1, num_rows, dtype=torch.int64), 1.0, CPU)
    (found,) = torch.autograd.grad(cross_entropy.cross_entropy_of_linear(hidden, weight, None, targets, torch.bfloat16), weight)
    precise = weight.detach().float().requires_grad_()
    rows = hidden.flatten(0, 1)[targets.rows].float()
    (truth,) = torch.autograd.grad(
        functional.cross_entropy(functional.linear(rows, precise), targets.labels, reduction="sum"), precise
    )
    assert distance(found.float(), truth) < 3e-3


@pytest.mark.parametrize("layer", ["linear", "any"])
def test_no_supervised_token_is_loss_zero_with_gradients(layer: str) -> None:
    hidden, weight = torch.randn(1, 4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    targets = targets_of(torch.full((1, 4), -100), 1.0, CPU)
    if layer == "linear":
        loss = cross_entropy.cross_entropy_of_linear(hidden, weight, None, targets, torch.float32)
    else:
        rows = hidden.flatten(0, 1)[targets.rows]
        loss = cross_entropy.cross_entropy_of(rows, lambda some: some @ weight.t(), targets)
    loss.backward()
    assert loss.item() == 0.0
    for leaf in (hidden, weight):
        # Not None: a rank whose head got no gradient would leave the others waiting for its part.
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


MODELS: dict[str, tuple[Any, bool]] = {
    "llama": (LlamaConfig(**SMALL), True),
    "llama-tied": (LlamaConfig(**SMALL, tie_word_embeddings=True), True),
    "qwen2": (Qwen2Config(**SMALL_KV), True),
    "mixture": (Qwen3MoeConfig(**SMALL_KV, num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2), True),
    "gpt2": (GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), True),
    "gemma2-caps-logits": (Gemma2Config(**SMALL_KV), False),
    "cohere-scales-logits": (CohereConfig(**SMALL_KV), False),
    "granite-divides-logits": (GraniteConfig(**SMALL_KV, logits_scaling=4.0), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_our_head_learns_what_it_learns_with_its_own(name: str) -> None:
    config, is_replaced = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if "gemma2" in name else "sdpa").train()
    assert head.returns_output_of_head(model) is is_replaced
    batch = small_batch()
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    plain = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum") * 0.5
    plain.backward()
    wanted = {parameter_name: parameter.grad.clone() for parameter_name, parameter in model.named_parameters()}
    names = list(model.state_dict())
    model.zero_grad()
    NextToken().install(model)
    with head.scored(targets_of(batch.labels, 0.5, CPU)) as scoring:
        model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    assert (scoring.loss is not None) is is_replaced
    loss = NextToken().weighted_loss(model, batch, 0.5, CPU, None)
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for parameter_name, parameter in model.named_parameters():
        assert distance(parameter.grad, wanted[parameter_name]) < 1e-6, parameter_name
    assert list(model.state_dict()) == names
    again = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    assert torch.equal(again, logits), "outside of a scored call the model gives its logits"


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_an_adapted_head_keeps_its_names_and_its_loss(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, **{"target_modules": ["q_proj"], **settings})).train()
    batch, names = small_batch(), list(model.state_dict())
    whole = NextToken().weighted_loss(model, batch, 1.0, CPU, None)
    whole.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    wanted = {name: parameter.grad.clone() for name, parameter in trained.items()}
    model.zero_grad()
    NextToken().install(model)
    with head.scored(targets_of(batch.labels, 1.0, CPU)) as scoring:
        model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    assert scoring.loss is not None
    NextToken().weighted_loss(model, batch, 1.0, CPU, None).backward()
    assert list(model.state_dict()) == names
    for name, parameter in trained.items():
        assert distance(parameter.grad, wanted[name]) < 1e-6, name


def test_under_autocast_the_products_are_of_its_type() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).train()
    batch = small_batch()
    whole = NextToken().weighted_loss(model, batch, 1.0, CPU, torch.bfloat16)
    whole.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    NextToken().install(model)
    found = NextToken().weighted_loss(model, batch, 1.0, CPU, torch.bfloat16)
    found.backward()
    assert found.item() == pytest.approx(whole.item(), rel=1e-6)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight.grad, wanted["model.layers.0.mlp.up_proj.weight"])


def test_size_counts_tokens_and_squares_of_documents() -> None:
    """Padding, here of the second row, is in neither."""
    lengths = [[3, 2], [4]]
    ends = np.cumsum([length for row in lengths for length in row])
    arrays = SplitArrays(np.arange(9), np.ones(9, dtype=bool), ends, np.array([2, 3]), np.array([5, 4]))
    batch = PreparedSplit.of(arrays, 0).batch([0, 1])
    assert batch.input_ids.numel() > 9
    assert NextToken().size(batch) == BatchSize(9, 9 + 4 + 16)


def small_batch() -> Batch:
    tokens = torch.arange(24).reshape(2, 12) * 7 % 64
    labels = tokens.clone()
    labels[0, :3] = -100
    return Batch(tokens, labels, torch.arange(12)[None].expand(2, 12).contiguous(), 20, (12, 12))


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
