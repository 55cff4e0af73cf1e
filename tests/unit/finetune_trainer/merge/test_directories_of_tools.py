"""Directories of adapters as training programs leave them: with files of their own, and settings that PEFT does not have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_trainer.roles import merge_command
from tests.unit.finetune_trainer.merge import tiny

MERGED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "HF Trainer": (("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"), {}),
    "LLaMA-Factory": (("all_results.json", "trainer_log.jsonl", "training_loss.png", "README.md"), {}),
    "axolotl": (("config.json", "debug.log", "README.md"), {"auto_mapping": None, "base_model_name_or_path": ""}),
    "unsloth": ((), {"target_modules": r"(?:.*?layers.*?(?:self_attn).*?(?:q_proj|v_proj))", "unsloth_fixed": True}),
    "ms-swift": (("additional_config.json", "args.json"), {"modules_to_save": [], "lora_dtype": None, "lorap_emb_lr": 1e-06}),
    "TRL with a reference": (("reference/adapter_config.json", "reference/adapter_model.safetensors"), {}),
    "DeepSpeed": (("global_step20/mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py"), {}),
    "torchtune": (("adapter_0.pt", "recipe_state/recipe_state.pt"), {"r": 4, "lora_alpha": 8}),
    "NeMo AutoModel": (("automodel_peft_config.json", "step_scheduler.pt"), {"lora_alpha": 8.0}),
    "PEFT 0.3": ((), {"enable_lora": None, "merge_weights": False, "fan_in_fan_out": False}),
    "megatron-bridge": ((), {"megatron_config": None, "megatron_core": "megatron.core", "r": 4.0}),
    "a hosted service": ((), {"base_model_name_or_path": "accounts/someone/models/base", "task_type": None}),
}
"""Program -> files that it leaves beside the adapter, and its settings. All are merged as PEFT merges the plain adapter."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "PiSSA": ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "changed the base weights when training began"),
    "X-LoRA": ({"peft_type": "XLORA"}, "it mixes adapters"),
    "AdaLoRA": ({"peft_type": "ADALORA"}, "moves ranks between layers"),
    "prompt tuning": ({"peft_type": "PROMPT_TUNING"}, "virtual tokens"),
    "activated LoRA": ({"alora_invocation_tokens": [1, 2]}, "switches itself on at run time"),
    "frankenmerge": ({"layer_replication": [[0, 2], [1, 2]]}, "different layers"),
    "another rank": ({"r": 8}, "expected [8, 96]"),
    "text for a number": ({"lora_alpha": "8"}, "of a kind that PEFT does not write"),
}
"""Kind of adapter -> its settings, and why it is refused before anything is written."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Return a base, an adapter, and PEFT's merge of them."""
    directory = tmp_path_factory.mktemp("pair")
    base = tiny.save_base(directory / "base", tiny.llama(), torch.bfloat16)
    adapter = tiny.save_adapter(directory / "adapter", base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    return base, adapter, tiny.peft_merged(base, adapter)


def left_by(tool: Path, adapter: Path, files: tuple[str, ...], settings: dict[str, Any]) -> Path:
    tool.mkdir()
    save_file(load_file(adapter / "adapter_model.safetensors"), tool / "adapter_model.safetensors")
    for name in files:
        (tool / name).parent.mkdir(exist_ok=True, parents=True)
        (tool / name).write_bytes(b"not what this name promises")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tool / "adapter_config.json").write_text(json.dumps(config | settings))
    return tool


@pytest.mark.parametrize("name", MERGED)
def test_directory_of_a_training_program_is_merged_as_peft_merges_it(
    tmp_path: Path, pair: tuple[Path, Path, dict[str, torch.Tensor]], name: str
) -> None:
    base, adapter, expected = pair
    tool = left_by(tmp_path / "tool", adapter, *MERGED[name])
    output = tmp_path / "merged"
    given = ["--base", str(base), "--adapter", str(tool), "--output", str(output), "--no-verify"]
    assert merge_command.main(given) == 0
    merged = load_file(output / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[key], expected[key]) for key in merged)
    others = {path.name for path in output.iterdir()} - {path.name for path in base.iterdir()}
    assert others == {"manifest.json"}, "files of the program are not the model's"


@pytest.mark.parametrize("name", REFUSED)
def test_adapter_that_would_give_a_wrong_model_is_refused_before_anything_is_written(
    tmp_path: Path, pair: tuple[Path, Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    settings, reason = REFUSED[name]
    base, adapter, _ = pair
    tool = left_by(tmp_path / "tool", adapter, (), settings)
    given = ["--base", str(base), "--adapter", str(tool), "--output", str(tmp_path / "merged"), "--no-verify"]
    assert merge_command.main(given) in (EXIT_CODES[FailureClass.USER_CONFIG], EXIT_CODES[FailureClass.USER_MODEL])
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err
    assert [path.name for path in tmp_path.iterdir()] == ["tool"]
