"""Models with frequencies of their own for long texts: each document is computed as alone, whatever stands next to it."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig, PreTrainedConfig

from finetune_trainer.data.batches import Batch
from finetune_trainer.model.packed_documents import document_lengths
from finetune_trainer.objective.next_token import NextToken

ORIGINAL, SHORT, LONG = 16, 10, 30
"""Positions of the first training, and the lengths of two documents."""
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + number for number in range(8)],
}
CONFIGS = [
    Phi3Config(**SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=ROPE),
    PhimoeConfig(
        **SIZES,
        num_local_experts=2,
        rope_parameters={**ROPE, "original_max_position_embeddings": ORIGINAL, "short_mscale": 1.0, "long_mscale": 1.2},
    ),
    LlamaConfig(
        **{**SIZES, "max_position_embeddings": ORIGINAL},
        initializer_range=0.2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1000.0},
    ),
]


def batch(*lengths: int, length: int = 0) -> Batch:
    """One row of documents, padded to `length`."""
    tokens = [(torch.arange(each) * 3 + each) % 63 + 1 for each in lengths]
    padding = torch.zeros(max(length - sum(lengths), 0), dtype=torch.int64)
    ids, labels = torch.cat([*tokens, padding])[None], torch.cat([*tokens, padding - 100])[None]
    # Every document's first token follows nothing.
    for start in torch.tensor([0, *lengths]).cumsum(0)[: len(lengths)]:
        labels[0, start] = -100
    positions = torch.cat([torch.arange(each) for each in (*lengths, len(padding))])[None]
    return Batch(ids, labels, positions, sum(lengths) - len(lengths), lengths)


def rows(*batches: Batch) -> Batch:
    """All as one batch."""
    parts = [torch.cat([getattr(each, name) for each in batches]) for name in ("input_ids", "labels", "position_ids")]
    return Batch(
        *parts, sum(each.num_supervised_tokens for each in batches), sum((each.document_lengths for each in batches), ())
    )


@pytest.fixture(params=CONFIGS, ids=lambda config: config.model_type)
def model(request: pytest.FixtureRequest) -> Any:
    config: PreTrainedConfig = request.param
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            # So large that positions count.
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return made.eval()


def losses(model: Any, *batches: Batch) -> float:
    with torch.no_grad():
        return sum(float(NextToken().weighted_loss(model, each, 1.0, torch.device("cpu"), None)) for each in batches)


@pytest.mark.parametrize(
    "together",
    [batch(SHORT, LONG), batch(LONG, SHORT), rows(batch(LONG), batch(SHORT, length=LONG))],
    ids=["packed", "packed after it", "padded"],
)
def test_a_long_document_changes_nothing_of_a_short_one(model: Any, together: Batch) -> None:
    alone = losses(model, batch(SHORT), batch(LONG))
    assert losses(model, together) != pytest.approx(alone, rel=1e-4), "transformers itself mixes them"
    for _ in range(2):
        NextToken().install(model)
    assert losses(model, together) == pytest.approx(alone, rel=1e-5)
    assert losses(model, batch(SHORT), batch(LONG)) == pytest.approx(alone, rel=1e-6)


def test_each_length_has_frequencies_of_its_own_whatever_came_before() -> None:
    config = CONFIGS[-1]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    alone = []
    for length in (20, 40):
        fresh: Any = AutoModelForCausalLM.from_config(config).eval()
        fresh.load_state_dict(model.state_dict())
        alone.append(losses(fresh, batch(length)))
    NextToken().install(model)
    assert losses(model, batch(40)) == pytest.approx(alone[1], rel=1e-6)
    assert losses(model, batch(20)) == pytest.approx(alone[0], rel=1e-6)
    assert losses(model, batch(20, 40)) == pytest.approx(sum(alone), rel=1e-5)


def test_lengths_of_documents() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    assert document_lengths(positions).tolist() == [[3, 3, 3, 1, 2, 2], [6] * 6]
