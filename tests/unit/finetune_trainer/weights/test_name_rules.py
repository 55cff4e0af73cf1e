"""Rules apply to names as transformers' loader applies them: the first match, the longest source, and what a target keeps."""

import pytest

from finetune_trainer.weights.name_rules import ExpertStack, NameRule, Renaming, Unreadable, match_rule


@pytest.mark.parametrize(
    ("rule", "name", "renamed"),
    [
        (Renaming((".block_sparse_moe.",), ".mlp."), "layers.0.block_sparse_moe.gate.weight", "layers.0.mlp.gate.weight"),
        (Renaming((r"^embed_out\.",), "lm_head."), "embed_out.weight", "lm_head.weight"),
        (Renaming((r"^h\.(\d+)\.",), r"layers.\1.block."), "h.12.attn.weight", "layers.12.block.attn.weight"),
        (Renaming(("w",), "v", scopes=("model.inner.", "inner.")), "model.inner.w", "model.inner.v"),
        (Renaming(("gate", "gate.up"), "joined"), "mlp.gate.up", "mlp.joined"),
    ],
)
def test_the_part_that_matches_becomes_the_target(rule: Renaming, name: str, renamed: str) -> None:
    found = match_rule(rule, name)
    assert found is not None
    assert found.with_target(rule.target) == renamed


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (Renaming((r"^embed_out\.",), "lm_head."), "model.embed_out.weight"),
        (Renaming(("w1",), "v"), "experts.w10"),
        (Renaming(("w",), "v", scopes=("vision.",)), "text.w"),
        (Unreadable(("qkv.weight",), ("q.weight", "k.weight"), "Chunk"), "layers.0.attn.out.weight"),
    ],
)
def test_other_names_are_left_alone(rule: NameRule, name: str) -> None:
    assert match_rule(rule, name) is None


def test_a_stack_tells_expert_and_source_of_a_matrix() -> None:
    rule = ExpertStack((".experts.*.w1.weight", ".experts.*.w3.weight"), ".experts.gate_up_proj")
    found = match_rule(rule, "layers.4.mlp.experts.17.w3.weight")
    assert found is not None
    assert (found.expert, found.source) == (17, 1)
    assert found.with_target(rule.target) == "layers.4.mlp.experts.gate_up_proj"
