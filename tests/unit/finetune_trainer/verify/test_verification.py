"""A right merge passes with room to spare; every way of being wrong that has shipped elsewhere is caught."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig

from finetune_trainer.files import file_sha256
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.verify import tensors
from finetune_trainer.verify.gate import GATES, LogitFigures, coarsest_dtype, gate_failures
from finetune_trainer.verify.logits import Reference, compare_logits
from finetune_trainer.verify.tensors import check_tensors
from finetune_trainer.verify.verification import gate_of_merge
from tests.support.cases import table
from tests.unit.finetune_trainer.merge import moe, tiny

RIGHT: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str | None]] = table(__file__, "RIGHT")


def merged_triple(directory: Path, case: str = "llama bf16") -> tuple[Path, Path, Path]:
    kind, settings, lora, dtype, out = RIGHT[case]
    base = tiny.save_base(directory / "base", getattr(tiny, kind)(**settings), getattr(torch, dtype))
    adapter = tiny.save_adapter(directory / "adapter", base, LoraConfig(**{"r": 8, "lora_alpha": 16, **lora}))
    merge_adapter(MergeOptions(base, (adapter,), directory / "merged", out, 1 << 30))
    return base, adapter, directory / "merged"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return merged_triple(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def triple(prepared: tuple[Path, Path, Path], tmp_path: Path) -> tuple[Path, Path, Path]:
    base, adapter, merged = (shutil.copytree(path, tmp_path / path.name) for path in prepared)
    return base, adapter, merged


def change_tensor(merged: Path, name: str, edit: Any, *, keep_manifest: bool = False) -> None:
    """Edits one tensor; without keep_manifest as a merge that went wrong, i.e. with a manifest that agrees."""
    path = merged / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = edit(tensors[name].clone()).contiguous()
    save_file(tensors, path, {"format": "pt"})
    if not keep_manifest:
        (merged / "manifest.json").unlink()


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_merge_passes_with_room(case: str, tmp_path: Path) -> None:
    base, adapter, merged = merged_triple(tmp_path, case)
    dtypes = [json.loads((path / "config.json").read_text())["dtype"] for path in (base, merged)]
    gate = GATES[coarsest_dtype(*dtypes)]
    report = tiny.verified(
        base, adapter, merged, gate=gate, report_path=tmp_path / "report.json", page_path=tmp_path / "report.md"
    )
    assert report.faults == ()
    assert report.passed
    assert report.tensors.num_changed > 0
    assert report.tensors.worst_rounding <= 1
    assert report.logits is not None
    assert report.logits.effect_mean_kl > 100 * report.logits.mean_kl  # else nothing was compared
    assert report.logits.mean_kl < gate.max_mean_kl / 5
    assert report.logits.max_abs_difference < gate.max_relative_difference * report.logits.max_abs_logit / 2
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["passed"] is True
    assert written["logits"]["num_positions"] == sum(len(prompt) for prompt in tiny.PROMPTS)
    assert written["tensors"]["num_changed"] == sum(found["num_changed"] for found in written["tensors"]["classes"].values())
    assert written["compared"]["merged"]["manifest.json"]
    assert "passed" in report.text()
    assert (tmp_path / "report.md").read_text().startswith("# Verification of the merge: passed\n")


def test_one_wrong_bit_in_an_untouched_tensor_is_found(triple: tuple[Path, Path, Path]) -> None:
    base, adapter, merged = triple

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.int16)[3, 7] ^= 1
        return tensor

    change_tensor(merged, "lm_head.weight", flip)
    assert any("lm_head.weight differs from the base" in fault for fault in check_tensors(base, [adapter], merged).faults)


def test_a_changed_tensor_beyond_rounding_is_found(triple: tuple[Path, Path, Path]) -> None:
    base, adapter, merged = triple
    name = "model.layers.1.mlp.down_proj.weight"

    def next_values(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.int16)[0] += 2  # two units in the last place
        return tensor

    change_tensor(merged, name, next_values)
    assert any(f"tensor {name} at [0, " in fault for fault in check_tensors(base, [adapter], merged).faults)


def test_a_bit_that_rots_after_the_merge_is_found_anywhere(triple: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, merged = triple
    path = merged / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    report = tiny.verified(base, adapter, merged)
    assert any("sha256" in fault for fault in report.faults)


def test_each_file_of_weights_is_hashed_once(
    triple: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the manifest, for what preflight recorded and for the report."""
    hashed: list[str] = []

    def recorded(path: Path) -> str:
        hashed.append(f"{path.parent.name}/{path.name}")
        return file_sha256(path)

    monkeypatch.setattr("finetune_trainer.files.file_sha256", recorded)
    base, adapter, merged = triple
    known = {"model.safetensors": file_sha256(base / "model.safetensors")}
    report = tiny.verified(base, adapter, merged, base_sha256=known)
    assert report.passed
    assert report.compared is not None
    assert report.compared.base["model.safetensors"] == known["model.safetensors"]
    assert hashed.count("merged/model.safetensors") == hashed.count("base/model.safetensors") == 1


def test_samples_are_computed_by_one_thread_because_others_hash_meanwhile(
    triple: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Recording(tensors.ExactMatrix):
        def rows(self, chosen):
            seen.append(torch.get_num_threads())
            return super().rows(chosen)

    monkeypatch.setattr(tensors, "ExactMatrix", Recording)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert not check_tensors(triple[0], [triple[1]], triple[2]).faults
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_a_copy_of_the_base_is_not_a_merged_model(triple: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, _ = triple
    faults = check_tensors(base, [adapter], base).faults
    assert any("the adapter was not merged" in fault for fault in faults)


def test_an_untrained_adapter_may_leave_the_base_as_it_is(tmp_path: Path) -> None:
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.bfloat16)
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(r=4, target_modules=["q_proj"]))
    path = adapter / "adapter_model.safetensors"
    save_file({name: t * 0 if "lora_B" in name else t for name, t in load_file(path).items()}, path, {"format": "pt"})
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    figures = check_tensors(base, [adapter], tmp_path / "merged")
    assert figures.is_zero_adapter
    assert figures.faults == []


def test_a_scaling_that_is_wrong_is_found_by_logits_alone(
    triple: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter, merged = triple
    shutil.rmtree(merged)
    config = adapter / "adapter_config.json"
    right = config.read_text()
    config.write_text(json.dumps({**json.loads(right), "lora_alpha": 4}))
    merge_adapter(MergeOptions(base, (adapter,), merged, None, 1 << 30))
    config.write_text(right)
    assert any("fp64" in fault for fault in check_tensors(base, [adapter], merged).faults)
    monkeypatch.setattr(
        "finetune_trainer.verify.verification.check_tensors", lambda *_: check_tensors(base, [adapter], prepared_copy())
    )

    def prepared_copy() -> Path:
        good = tmp_path / "good"
        merge_adapter(MergeOptions(base, (adapter,), good, None, 1 << 30))
        return good

    report = tiny.verified(base, adapter, merged)
    assert not report.passed
    assert any("distance from base + adapter" in fault for fault in report.faults)
    assert "FAILED" in report.text()


def test_one_position_out_of_line_is_measured_and_not_judged_and_three_are_judged(
    triple: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, adapter, merged = triple
    prompts = [[token] for token in range(10, 30)]

    def figures(*tokens: int) -> LogitFigures:
        def negate(tensor: torch.Tensor) -> torch.Tensor:
            tensor[list(tokens)] *= -1
            return tensor

        other = tmp_path / f"other-{len(tokens)}"
        shutil.copytree(merged, other)
        change_tensor(other, "model.embed_tokens.weight", negate)
        (found,) = compare_logits([Reference(base, [adapter])], other, prompts, tmp_path)
        return found

    gate = GATES["bfloat16"]
    one, three = figures(12), figures(12, 14, 16)
    assert one.max_abs_difference > 10 * one.usual_abs_difference
    assert one.relative_difference <= gate.allowed_difference(one)
    assert three.usual_abs_difference > 10 * one.usual_abs_difference
    assert any("of 90% of positions" in fault for fault in gate_failures(three, gate))


@pytest.mark.parametrize(("named", "stored", "merged"), table(__file__, "ELEMENT_TYPES"))
def test_a_base_that_runs_in_another_type_than_its_files_hold_is_judged_by_the_coarser(
    named: str | None, stored: str, merged: str | None, tmp_path: Path
) -> None:
    """transformers loads a model in the type that config.json names, as many on the Hub do that were stored in another one."""
    base = tiny.save_base(tmp_path / "base", tiny.llama(), getattr(torch, stored))
    config = json.loads((base / "config.json").read_text())
    del config["dtype"]
    (base / "config.json").write_text(json.dumps(config | ({"torch_dtype": named} if named else {})))
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(r=8, target_modules="all-linear"))
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", merged, 1 << 30))
    gate = gate_of_merge(base, merged)
    report = tiny.verified(base, adapter, tmp_path / "merged", gate=gate)
    assert report.faults == ()
    assert gate is GATES[named or "float32"]


def test_verification_without_prompts_is_an_error(triple: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, merged = triple
    with pytest.raises(ValueError, match="prompts"):
        tiny.verified(base, adapter, merged, prompts=[])


def test_token_agreement_need_not_exceed_that_of_pefts_own_merge(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
    per_layer = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
    config = Gemma4TextConfig(vocab_size=320, num_key_value_heads=2, global_head_dim=16, **sizes, **per_layer)
    base = tiny.save_base(tmp_path / "base", config, torch.bfloat16)
    settings = LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules="all-linear")
    adapter = tiny.save_adapter(tmp_path / "adapter", base, settings)
    merged = tiny.merged(base, adapter)
    prompts = [torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
    gate = replace(GATES["bfloat16"], min_top1_agreement=0.999)
    report = tiny.verified(base, adapter, merged, prompts=prompts, gate=gate)
    assert report.passed, report.faults
    assert report.gate.min_top1_agreement < 0.99, "the two models of PEFT agree at about 95 % of positions"
    assert not tiny.verified(base, adapter, merged, prompts=prompts, gate=replace(gate, max_excused=0)).passed


def test_adapters_of_two_parameters_of_one_module_are_both_in_the_reference(tmp_path: Path) -> None:
    base = moe.save_base(tmp_path / "base", "mixtral", torch.float32)
    experts = LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    first = tiny.save_adapter(tmp_path / "first", base, experts)
    second = tiny.save_adapter(tmp_path / "second", base, LoraConfig(r=4, target_modules=["q_proj"]), seed=6)
    prompts = [[1, 5, 9, 20, 33, 60] * 5, [2, 3, 40, 50, 11]]
    report = tiny.verified(base, [first, second], tiny.merged(base, first, second), prompts=prompts)
    assert report.passed, report.faults
    assert report.logits is not None
    assert report.logits.relative_difference < 1e-5
