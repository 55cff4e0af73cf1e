"""QLoRA and QDoRA: the gate judges the base that the merge used; the figures of the other base are reported next to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from finetune_job.api.enumerations import MergeBase
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.verify.report import VerificationReport
from tests.unit.finetune_trainer.merge import tiny

NF4 = Quantization("nf4", double_quant=True, load_dtype="bfloat16", compute_dtype="bfloat16")


@pytest.fixture(scope="module", params=[False, True], ids=["QLoRA", "QDoRA"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("trained")
    base = tiny.save_base(directory / "base", tiny.llama(), torch.bfloat16)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "up_proj"], use_dora=request.param)
    return base, tiny.save_adapter(directory / "adapter", base, lora)


def verified(trained: tuple[Path, Path], merged_onto: MergeBase, claimed: MergeBase, directory: Path) -> VerificationReport:
    base, adapter = trained
    packed = NF4 if merged_onto is MergeBase.DEQUANTIZED else None
    merge_adapter(MergeOptions(base, (adapter,), directory / "merged", None, 1 << 30, packed))
    page = directory / "report.md"
    return tiny.verified(base, adapter, directory / "merged", quantization=NF4, merged_onto=claimed, page_path=page)


@pytest.mark.parametrize("onto", [MergeBase.ORIGINAL, MergeBase.DEQUANTIZED])
def test_the_gate_is_about_the_base_that_was_used(onto: MergeBase, trained: tuple[Path, Path], tmp_path: Path) -> None:
    report = verified(trained, onto, onto, tmp_path)
    assert report.faults == ()
    assert report.merged_onto == onto.value
    assert report.logits is not None
    assert report.other_logits is not None
    # Quantisation moves the model much further than rounding does: the two references differ.
    assert report.other_logits.mean_kl > 100 * report.logits.mean_kl
    other = {"Original": "Dequantized", "Dequantized": "Original"}[onto.value]
    assert f"## Against the other base: {other}" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("onto", [MergeBase.ORIGINAL, MergeBase.DEQUANTIZED])
def test_a_merge_onto_the_wrong_base_fails(onto: MergeBase, trained: tuple[Path, Path], tmp_path: Path) -> None:
    claimed = next(base for base in (MergeBase.ORIGINAL, MergeBase.DEQUANTIZED) if base is not onto)
    assert not verified(trained, onto, claimed, tmp_path).passed


def test_dequantized_needs_settings_to_unpack_with(trained: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="no quantization is given"):
        tiny.verified(*trained, trained[0], merged_onto=MergeBase.DEQUANTIZED)
