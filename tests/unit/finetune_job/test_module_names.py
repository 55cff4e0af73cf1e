"""Names of embeddings, output heads and routers, as transformers' models have them."""

import pytest

from finetune_job.module_names import is_embedding, is_router


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.block_sparse_moe.gate", True),
        ("model.layers.0.mlp.router.weight", True),
        ("model.layers.0.block_sparse_moe.router.layer", True),
        ("decoder.block.1.layer.2.mlp.router.classifier", True),
        ("model.layers.0.mlp.gate.e_score_correction_bias", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.shared_expert_gate", False),
        ("classifier", False),
    ],
)
def test_routers(name: str, expected: bool) -> None:
    assert is_router(name) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens", True),
        ("transformer.wte", True),
        ("transformer.wpe", True),
        ("tokens_embed", True),
        ("shared", True),
        ("decoder.embed_positions", True),
        ("embed_out", False),
        ("lm_head", False),
        ("model.layers.0.mlp.gate", False),
    ],
)
def test_embeddings(name: str, expected: bool) -> None:
    assert is_embedding(name) is expected
