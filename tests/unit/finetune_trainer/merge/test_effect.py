"""Adapters that do not fit: of another base by their own digest, of a base of another name, or without effect."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig
from safetensors.torch import load_file, save_file

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_trainer.roles import merge_command
from finetune_trainer.weights.base_identity import BASE_KEY, weights_digest
from finetune_trainer.weights.headers import read_checkpoint
from tests.unit.finetune_trainer.merge import tiny

LORA = LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
REFUSED = EXIT_CODES[FailureClass.USER_CONFIG]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_base(tmp_path_factory.mktemp("models") / "base", tiny.llama(), torch.bfloat16)


def rewritten(adapter: Path, scale: float = 1.0, digest: str | None = None, **settings: Any) -> Path:
    """Scale the adapter's tensors that begin at zero (or IA3's at one), record a base, and change settings."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        tensors[name] = 1 + (tensor - 1) * scale if "ia3" in name else tensor * scale if "lora_B" in name else tensor
    save_file(tensors, path, {"format": "pt"})
    if digest is not None:
        (adapter / "manifest.json").write_text(json.dumps({BASE_KEY: digest}))
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return adapter


def merge(base: Path, adapter: Path, output: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any, str]:
    """Return the exit code, the report, or None if there is none, and standard error."""
    code = merge_command.main(["--base", str(base), "--adapter", str(adapter), "--output", str(output), "--no-verify", *more])
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    return code, next((line["report"] for line in lines if "report" in line), None), err


def test_recorded_base_is_compared_by_its_weights(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = rewritten(tiny.save_adapter(tmp_path / "adapter", base, LORA), digest=weights_digest(read_checkpoint(base)))
    resharded = tiny.save_base(tmp_path / "resharded", tiny.llama(), torch.bfloat16, "100KB")
    assert len(list(resharded.glob("*.safetensors"))) > 1
    code, report, _ = merge(resharded, adapter, tmp_path / "merged", capsys)
    assert (code, report["warnings"]) == (0, [])

    other = tiny.save_base(tmp_path / "other", tiny.llama(), torch.bfloat16)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    code, report, err = merge(other, adapter, tmp_path / "wrong", capsys)
    assert (code, report) == (REFUSED, None)
    assert f"trained on other weights than those in {other}" in err
    assert not (tmp_path / "wrong").exists()
    assert merge(other, adapter, tmp_path / "wrong", capsys, "--force")[0] == 0


def test_second_adapter_may_have_been_trained_on_the_merge_of_the_first(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = rewritten(tiny.save_adapter(tmp_path / "first", base, LORA), digest=weights_digest(read_checkpoint(base)))
    second = rewritten(tiny.save_adapter(tmp_path / "second", base, LORA, seed=6), digest="0" * 64)
    assert merge(base, first, tmp_path / "merged", capsys, "--adapter", str(second))[0] == 0
    assert merge(base, second, tmp_path / "other", capsys, "--adapter", str(first))[0] == REFUSED


def test_rows_at_the_end_of_a_large_embedding_make_another_base(tmp_path: Path) -> None:
    rows = torch.zeros(4096, 8)
    save_file({"embed.weight": rows}, tmp_path / "model.safetensors")
    before = weights_digest(read_checkpoint(tmp_path))
    rows[-1] = 1
    save_file({"embed.weight": rows}, tmp_path / "model.safetensors")
    assert weights_digest(read_checkpoint(tmp_path)) != before


@pytest.mark.parametrize(
    ("directory", "named", "is_doubtful"),
    [
        ("m", "example-org/Other-8B", True),
        ("other-8b", "example-org/Other-8B", False),
        ("models--example-org--Other-8B/snapshots/0123", "example-org/Other-8B", False),
        ("m", "/home/someone/models/m", False),
        ("m", None, False),
        ("m", 7, False),
    ],
)
def test_base_of_another_name_is_doubtful(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], directory: str, named: Any, is_doubtful: bool
) -> None:
    place = tmp_path / directory
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(base)
    adapter = rewritten(tiny.save_adapter(tmp_path / "adapter", base, LORA), base_model_name_or_path=named)
    code, report, _ = merge(place, adapter, tmp_path / "merged", capsys)
    assert code == 0
    assert [f"names {named} as its base" in warning for warning in report["warnings"]] == [True] * is_doubtful


@pytest.mark.parametrize("settings", [LORA, IA3Config(target_modules=["k_proj"], feedforward_modules=[])], ids=["LoRA", "IA3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adapter_without_effect_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: PeftConfig, dtype: str
) -> None:
    adapter = rewritten(tiny.save_adapter(tmp_path / "adapter", base, settings), scale=0)
    code, report, err = merge(base, adapter, tmp_path / "merged", capsys, "--dtype", dtype)
    assert (code, report) == (REFUSED, None)
    assert "equals the base in every value" in err
    assert "--force" in err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    code, report, _ = merge(base, adapter, tmp_path / "merged", capsys, "--dtype", dtype, "--force")
    assert code == 0
    assert "equals the base in every value" in report["warnings"][-1]


def test_changes_below_the_rounding_of_the_element_type_have_no_effect(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = rewritten(tiny.save_adapter(tmp_path / "adapter", base, LORA), scale=1e-9)
    assert merge(base, adapter, tmp_path / "merged", capsys)[0] == REFUSED
    assert merge(base, adapter, tmp_path / "merged", capsys, "--dtype", "float32")[0] == 0
