"""A base with code of its own: its merge is verified with that code where the job allows it, and never runs it elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.verify import streaming
from tests.unit.finetune_trainer.merge import tiny

PROMPTS = [[1, 5, 9, 200, 17, 33, 250, 4], [2, 3, 4, 90, 91]]
CONFIGURATION = """
from transformers import LlamaConfig

class TheirConfig(LlamaConfig):
    model_type = "theirs"
"""
MODEL = """
from transformers import LlamaForCausalLM
from .configuration_theirs import TheirConfig

class TheirForCausalLM(LlamaForCausalLM):
    config_class = TheirConfig
"""
THEIRS = {
    "model_type": "theirs",
    "architectures": ["TheirForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_theirs.TheirConfig", "AutoModelForCausalLM": "modeling_theirs.TheirForCausalLM"},
}
"""What config.json says of a model that transformers does not have."""


@pytest.fixture
def merged(tmp_path: Path) -> tuple[Path, list[Path], Path]:
    """A base with its own code, two adapters and their merge."""
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.bfloat16)
    settings = LoraConfig(r=8, target_modules="all-linear")
    adapters = [tiny.save_adapter(tmp_path / f"adapter-{seed}", base, settings, seed=seed) for seed in (1, 2)]
    (base / "configuration_theirs.py").write_text(CONFIGURATION)
    (base / "modeling_theirs.py").write_text(MODEL)
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | THEIRS))
    merge_adapter(MergeOptions(base, tuple(adapters), tmp_path / "merged", None, 1 << 30))
    return base, adapters, tmp_path / "merged"


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_model_with_code_of_its_own_is_verified(
    merged: tuple[Path, list[Path], Path], monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    monkeypatch.setattr(streaming, "MAX_WHOLE_BYTES", 1 << 30 if is_whole else 0)
    report = tiny.verified(*merged, prompts=PROMPTS, allow_remote_code=True)
    assert report.passed
    assert report.logits is not None
    assert report.logits.effect_mean_kl > 100 * report.logits.mean_kl


def test_what_a_quantised_training_packed_of_it_is_not_compared_besides(merged: tuple[Path, list[Path], Path]) -> None:
    """Which layers were packed transformers alone would know; the merge is into the original, which is compared."""
    packed = Quantization("nf4", double_quant=True, load_dtype="bfloat16", compute_dtype="bfloat16")
    report = tiny.verified(*merged, prompts=PROMPTS, allow_remote_code=True, quantization=packed)
    assert report.passed
    assert report.other_logits is None


def test_its_code_does_not_run_where_that_is_not_allowed(merged: tuple[Path, list[Path], Path]) -> None:
    for directory in (merged[0], merged[2]):
        (directory / "configuration_theirs.py").write_text("raise SystemExit('their code ran')")
        # What ran in this process before is known by its name.
        settings = json.loads((directory / "config.json").read_text()) | {"model_type": "not_run_before"}
        (directory / "config.json").write_text(json.dumps(settings))
    (merged[2] / "manifest.json").unlink()
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny.verified(*merged, prompts=PROMPTS, allow_remote_code=False)
