"""Every merged tensor has exactly the bits of PEFT's merge_and_unload(safe_merge=False) on a CPU."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from finetune_trainer.merge import stream
from finetune_trainer.merge.merge_adapter import MergeOptions, MergeReport, merge_adapter
from finetune_trainer.merge.steps import low_rank
from finetune_trainer.processes.start import preload
from finetune_trainer.weights.errors import AdapterTensorError
from tests.unit.finetune_trainer.merge import tiny

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONV1D = ["c_attn", "c_proj", "c_fc"]

CASES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "lora": (tiny.llama(), {"r": 8, "lora_alpha": 13, "target_modules": ALL_LINEAR}),
    "dora": (tiny.llama(), {"r": 8, "lora_alpha": 13, "use_dora": True, "target_modules": ALL_LINEAR}),
    "dora embeddings": (tiny.llama(), {"r": 4, "use_dora": True, "target_modules": ["embed_tokens", "v_proj"]}),
    "bias all next to a saved norm": (
        tiny.gpt2(),
        {"fan_in_fan_out": True, "target_modules": ["c_attn"], "bias": "all", "modules_to_save": ["ln_f"]},
    ),
    "qwen2 lora": (tiny.qwen2(), {"r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR}),
    "gpt2 lora": (tiny.gpt2(), {"r": 8, "lora_alpha": 13, "fan_in_fan_out": True, "target_modules": CONV1D}),
    "gpt2 dora": (tiny.gpt2(), {"r": 8, "use_dora": True, "fan_in_fan_out": True, "target_modules": CONV1D}),
}
"""One case of each kind of arithmetic. The merge matrix has all combinations of options."""


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The cases take these in turn. The merge matrix has all combinations."""


def merged_and_reference(
    tmp_path: Path,
    config: PreTrainedConfig,
    lora: dict[str, Any],
    dtype: torch.dtype,
    *,
    adapter_dtype: torch.dtype | None = None,
    out: str | None = None,
    load: torch.dtype | None = None,
    max_shard_bytes: int = 1 << 30,
    base_shard: str = "1GB",
) -> tuple[MergeReport, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    base = tiny.save_base(tmp_path / "base", config, dtype, base_shard)
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(**lora), adapter_dtype)
    report = merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", out, max_shard_bytes))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "merged").glob("*.safetensors")):
        tensors |= load_file(path)
    return report, tensors, tiny.peft_merged(base, adapter, load)


def assert_same_bits(merged: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], is_tied: bool) -> None:
    expected = {name for name in reference if not (is_tied and name == "lm_head.weight")}
    assert set(merged) == expected
    different = [n for n, t in merged.items() if t.dtype != reference[n].dtype or not torch.equal(t, reference[n])]
    assert different == []


@pytest.mark.parametrize(("case", "dtype"), [(case, DTYPES[number % len(DTYPES)]) for number, case in enumerate(CASES)])
def test_every_tensor_has_pefts_bits(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, lora = CASES[case]
    report, merged, reference = merged_and_reference(tmp_path, config, lora, dtype)
    assert_same_bits(merged, reference, config.tie_word_embeddings)
    assert report.num_changed_tensors > 0
    untouched = torch.nn.Module.state_dict(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    changed = [name for name, tensor in merged.items() if not torch.equal(tensor, untouched[name])]
    assert len(changed) == report.num_changed_tensors


def test_a_bias_that_is_written_twice_and_differs_is_refused(tmp_path: Path) -> None:
    """With bias "all", PEFT writes the bias of a module that it saves whole under several names."""
    config, lora = CASES["bias all next to a saved norm"]
    base = tiny.save_base(tmp_path / "base", config, torch.float32)
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(**lora))
    file, copy = adapter / "adapter_model.safetensors", "base_model.model.transformer.ln_f.modules_to_save.bias"
    tensors = load_file(file)
    tensors[copy][0] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(AdapterTensorError, match=copy):
        merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_adapter_is_upcast_first(adapter_dtype: torch.dtype, tmp_path: Path) -> None:
    config, lora = CASES["dora"]
    _, merged, reference = merged_and_reference(tmp_path, config, lora, torch.bfloat16, adapter_dtype=adapter_dtype)
    assert_same_bits(merged, reference, is_tied=False)


@pytest.mark.parametrize(
    ("base", "out", "load"),
    [
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.float32),
        (torch.float16, "bfloat16", torch.float32),
        (torch.bfloat16, "bfloat16", torch.bfloat16),
    ],
)
def test_another_output_dtype_equals_a_wide_merge_that_is_cast(
    base: torch.dtype, out: str, load: torch.dtype, tmp_path: Path
) -> None:
    config = tiny.llama()
    lora = {"r": 4, "target_modules": ["embed_tokens", "q_proj", "up_proj"], "modules_to_save": ["lm_head", "norm"]}
    _, merged, reference = merged_and_reference(tmp_path, config, lora, base, out=out, load=load)
    cast = {name: tensor.to(getattr(torch, out)) for name, tensor in reference.items()}
    assert_same_bits(merged, cast, is_tied=False)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == getattr(torch, out)


def test_many_shards_in_and_out_give_the_same_tensors(tmp_path: Path) -> None:
    config, lora = CASES["lora"]
    report, merged, reference = merged_and_reference(
        tmp_path, config, lora, torch.bfloat16, max_shard_bytes=200_000, base_shard="300KB"
    )
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    shards = list((tmp_path / "merged").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 200_000 + 20_000 for path in shards)
    assert_same_bits(merged, reference, is_tied=False)
    assert report.bytes_written == sum(path.stat().st_size for path in shards)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert_same_bits(dict(loaded), reference, is_tied=False)


def test_a_checkpoint_without_the_first_name_part_is_matched(tmp_path: Path) -> None:
    """The Hub's gpt2 lacks the prefix `transformer.`, and the merged model keeps the base's names."""
    config, lora = CASES["gpt2 lora"]
    base = tiny.save_base(tmp_path / "base", config, torch.float32)
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(**lora))
    reference = tiny.peft_merged(base, adapter)
    short = {name.removeprefix("transformer."): t for name, t in load_file(base / "model.safetensors").items()}
    save_file(short, base / "model.safetensors", {"format": "pt"})
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(merged) == set(short)
    assert all(torch.equal(tensor, reference[f"transformer.{name}"]) for name, tensor in merged.items())


class Convolutions(torch.nn.Module):
    """One convolution of each kind, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv1d(6, 10, 3)
        self.second = torch.nn.Conv2d(5, 12, (3, 5), bias=False)
        self.third = torch.nn.Conv3d(4, 8, 2)
        self.last = torch.nn.Linear(9, 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["first", "second", "third", "last"]},
        {"target_modules": ["second", "third"], "use_dora": True, "use_rslora": True},
        {"target_modules": ["first", "third"], "lora_bias": True},
        {"target_modules": ["first", "second"], "rank_pattern": {"second": 5}, "alpha_pattern": {"first": 2}},
    ],
    ids=["lora", "dora", "lora bias", "patterns"],
)
def test_convolutions_have_pefts_bits(settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Convolutions().to(dtype)
    base = tmp_path / "base"
    base.mkdir()
    save_file(model.state_dict(), base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": false}')
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **settings))
    tiny.save_peft(adapted, tmp_path / "adapter")
    merge_adapter(MergeOptions(base, (tmp_path / "adapter",), tmp_path / "merged", None, 1 << 30))
    reference = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").merge_and_unload().state_dict()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert_same_bits(merged, dict(reference), is_tied=False)
    assert not torch.equal(
        merged[f"{settings['target_modules'][0]}.weight"], model.state_dict()[f"{settings['target_modules'][0]}.weight"]
    )


def test_where_blocks_would_differ_weights_are_merged_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "_exact", {})
    monkeypatch.setattr(low_rank, "is_exact", lambda *_: False)
    config, lora = CASES["lora"]
    report, merged, reference = merged_and_reference(tmp_path, config, lora, torch.bfloat16)
    assert_same_bits(merged, reference, is_tied=False)
    assert len(report.whole_tensors) == report.num_changed_tensors


@pytest.mark.parametrize("out", [None, "float32"], ids=["steps", "casts"])
def test_operations_have_as_many_threads_after_a_merge_as_before(
    out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker computed before the number was saved, one thread would remain, and verification would take twice as long."""
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.bfloat16)
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(target_modules=["q_proj"]))

    def late(module: str) -> None:
        preload(module)
        time.sleep(0.2)

    monkeypatch.setattr(stream, "preload", late)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        # A thread that has not asked before, as the first one of a process.
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(merge_adapter, MergeOptions(base, (adapter,), tmp_path / "merged", out, 1 << 30)).result()
        with ThreadPoolExecutor(1) as fresh:
            assert fresh.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
