"""The page for people says the verdict first and shows thresholds next to what was measured."""

from __future__ import annotations

import dataclasses
import json

from finetune_trainer.verify.gate import GATES
from finetune_trainer.verify.report import Compared, VerificationReport, verification_page
from finetune_trainer.verify.tensors import TENSOR_CLASSES, TensorFigures, class_of
from tests.support.cases import table
from tests.unit.finetune_trainer.verify.test_gate import GOOD

FIGURES = dataclasses.replace(GOOD, num_positions=1000)


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
    expected = table(__file__, "test_classes_of_tensors_by_name")
    assert {name: class_of(name) for name in expected} == expected
    assert set(expected.values()) <= set(TENSOR_CLASSES)
