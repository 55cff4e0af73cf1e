"""The page for people says the verdict first and shows thresholds next to what was measured."""

from __future__ import annotations

import dataclasses
import json

from finetune_trainer.verify.gate import GATES, LogitFigures
from finetune_trainer.verify.report import Compared, VerificationReport, verification_page
from finetune_trainer.verify.tensors import TENSOR_CLASSES, TensorFigures, class_of

FIGURES = LogitFigures(
    num_prompts=4,
    num_positions=1000,
    max_abs_difference=0.1,
    usual_abs_difference=0.1,
    max_abs_logit=20.0,
    mean_kl=1e-4,
    effect_mean_kl=0.5,
    top1_agreement=0.99,
)


def report() -> VerificationReport:
    tensors = TensorFigures()
    queries = tensors.classes["attention q"]
    queries.num_changed, queries.num_values_sampled, queries.worst_rounding = 32, 4096, 0.75
    queries.squared_change, queries.squared_base = 4.0, 10000.0
    tensors.classes["norms"].num_untouched = 65
    return VerificationReport(
        passed=True,
        faults=(),
        tensors=tensors,
        logits=FIGURES,
        gate=GATES["bfloat16"],
        seconds=61.2,
        merged_onto="Original",
        other_logits=None,
        compared=Compared({"config.json": "aa"}, ({"adapter_model.safetensors": "bb"},), {"manifest.json": "cc"}),
        peak_memory_bytes=3 << 30,
    )


def test_the_verdict_comes_first_and_every_figure_has_its_threshold() -> None:
    page = verification_page(report())
    assert page.startswith("# Verification of the merge: passed\n")
    assert "97 tensors" in page
    assert "61 s" in page
    assert "3.0 GiB" in page
    for row in (
        "| largest difference of 90% of positions, of the largest logit | 0.005 | at most 0.0938 |",
        "| mean KL divergence of 90% of positions, nats | 0.0001 | at most 0.005 |",
        "| same most likely token | 99.000% | at least 97.00% |",
        "| mean KL divergence, of the adapter's effect | 0.02% | at most 10% if the effect exceeds 0.005 |",
        "| attention q | 0 | 32 | 4,096 | 0.75 | 2.00e-02 |",
        "| norms | 65 | 0 | 0 |  |  |",
        "| base | `config.json` | `aa` |",
        "| adapter | `adapter_model.safetensors` | `bb` |",
        "| merged | `manifest.json` | `cc` |",
    ):
        assert f"{row}\n" in page
    assert "router" not in page
    assert "What is wrong" not in page
    assert "other base" not in page


def test_faults_stand_above_all_figures_and_their_number_is_bounded() -> None:
    faults = tuple(f"tensor {number} is wrong" for number in range(80))
    page = verification_page(dataclasses.replace(report(), passed=False, faults=faults, logits=None))
    assert page.startswith("# Verification of the merge: FAILED\n")
    assert page.index("* tensor 0 is wrong") < page.index("## Tensors")
    assert "* and 30 more in the JSON report" in page
    assert "Logits were not compared" in page


def test_the_other_base_of_a_quantised_training_is_shown_without_thresholds() -> None:
    other = dataclasses.replace(FIGURES, mean_kl=0.0123)
    page = verification_page(dataclasses.replace(report(), other_logits=other))
    assert "## Against the other base: Dequantized" in page
    assert "| mean KL divergence of 90% of positions, nats | 0.0123 |\n" in page


def test_changes_that_only_logits_can_judge_are_said_to_be() -> None:
    changed = report()
    changed.tensors.classes["mlp up"].num_changed = changed.tensors.classes["mlp up"].num_by_logits_only = 7
    assert "7 changed tensors can be merged by PEFT's own layers only" in verification_page(changed)


def test_json_holds_totals_and_only_classes_that_the_model_has() -> None:
    written = json.loads(report().json())
    assert list(written["tensors"]["classes"]) == ["attention q", "norms"]
    assert written["tensors"]["classes"]["attention q"]["relative_change"] == 0.02
    assert (written["tensors"]["num_changed"], written["tensors"]["num_untouched"]) == (32, 65)


def test_classes_of_tensors_by_name() -> None:
    expected = {
        "model.layers.0.self_attn.q_proj.weight": "attention q",
        "model.layers.0.self_attn.o_proj.bias": "attention o",
        "model.layers.0.mlp.gate_proj.weight": "mlp gate",
        "model.layers.0.mlp.down_proj.weight": "mlp down",
        "model.layers.0.input_layernorm.weight": "norms",
        "model.layers.0.self_attn.q_norm.weight": "norms",
        "model.embed_tokens.weight": "embeddings",
        "lm_head.weight": "output head",
        "model.layers.0.block_sparse_moe.experts.3.w1.weight": "experts",
        "model.layers.0.block_sparse_moe.gate.weight": "router",
        "model.layers.0.mlp.gate.e_score_correction_bias": "router",
        "transformer.blocks.0.ffn.router.layer.weight": "router",
        "encoder.block.1.layer.1.mlp.router.classifier.weight": "router",
        "classifier.weight": "other",
        "model.layers.0.mlp.experts.gate_up_proj": "experts",
        "h.0.attn.c_attn.weight": "attention q+k+v",
        "h.0.attn.c_proj.weight": "attention o",
        "h.0.mlp.c_proj.weight": "mlp down",
        "h.0.ln_1.weight": "norms",
        "transformer.ln_f.bias": "norms",
        "decoder.block.0.layer.2.DenseReluDense.wo.weight": "mlp down",
        "decoder.block.0.layer.0.SelfAttention.o.weight": "attention o",
        "model.layers.0.mamba.A_log": "other",
    }
    assert {name: class_of(name) for name in expected} == expected
    assert set(expected.values()) <= set(TENSOR_CLASSES)
