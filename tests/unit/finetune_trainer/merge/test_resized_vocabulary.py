"""Adapters that were trained after resize_token_embeddings, as PEFT's recipe for added chat tokens says, can be merged.

The expected values are PEFT's: the base is resized to as many rows, and the adapter is loaded and merged.
"""

from __future__ import annotations

import json
import logging
import os
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PhiConfig, PreTrainedConfig, T5Config

from finetune_job.api.enumerations import MergeBase
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.inputs import num_tokens
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.verify import streaming, tensors
from finetune_trainer.verify.gate import GATES, gate_failures
from finetune_trainer.verify.logits import Reference, compare_logits
from finetune_trainer.verify.prompts import default_prompts
from finetune_trainer.weights.errors import AdapterTensorError, BrokenCheckpointError, UnsupportedAdapterError
from finetune_trainer.weights.families import vocabulary_settings
from finetune_trainer.weights.headers import ADAPTER_FILE
from tests.unit.finetune_trainer.merge import moe, tiny
from tests.unit.finetune_trainer.merge.test_text_parts import CONFIGS

OLD, NEW, PADDED = 320, 326, 384
BOTH = ["embed_tokens", "lm_head"]
INPUT, OUTPUT = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
PROMPTS = [[1, 5, 9, 200, 17, 33, 250, 4], [2, 3, 321, 320, 4, 325], [300, 11, 12, 13, 90, 91]]


def phi() -> PreTrainedConfig:
    """Return a configuration of a model whose output embeddings have a bias."""
    return PhiConfig(
        vocab_size=OLD,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )


def t5() -> PreTrainedConfig:
    return T5Config(
        vocab_size=OLD, d_model=96, d_kv=24, d_ff=200, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 7, "target_modules": ["q_proj"], **settings})


@dataclass(frozen=True)
class Case:
    """A base, and how its adapter is trained and saved. tied: whether the merged model has one tensor for both embeddings."""

    config: PreTrainedConfig
    settings: PeftConfig
    dtype: torch.dtype
    num_rows: int = NEW
    tied: bool = False
    auto: Any = AutoModelForCausalLM
    file_dtype: torch.dtype | None = None
    shard_size: str = "1GB"
    save: dict[str, Any] = field(default_factory=dict)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, Case] = {
    "saved": Case(tiny.llama(), lora(modules_to_save=list(BOTH)), BF16),
    "saved in shards": Case(tiny.llama(), lora(modules_to_save=list(BOTH)), FP16, shard_size="120KB"),
    "saved as fp32": Case(tiny.llama(), lora(modules_to_save=list(BOTH)), BF16, file_dtype=FP32),
    "untrained and padded": Case(tiny.llama(), lora(), FP32, num_rows=PADDED),
    "asked for": Case(tiny.llama(), lora(), FP16, save={"save_embedding_layers": True}),
    "rows": Case(tiny.llama(), lora(trainable_token_indices=[3, 321, 325]), BF16),
    "rows of both": Case(tiny.llama(), lora(trainable_token_indices={"embed_tokens": [3, 321], "lm_head": [324]}), FP32),
    "adapted": Case(tiny.llama(), lora(target_modules=["q_proj", *BOTH]), BF16, file_dtype=FP32),
    "adapted with DoRA": Case(tiny.llama(), lora(target_modules=["q_proj", *BOTH], use_dora=True), FP16),
    "tied, saved apart": Case(tiny.qwen2(), lora(modules_to_save=list(BOTH)), BF16),
    "tied, saved on one side": Case(tiny.qwen2(), lora(modules_to_save=["embed_tokens"]), FP32),
    "tied, saved together": Case(tiny.qwen2(), lora(modules_to_save=list(BOTH), ensure_weight_tying=True), FP32, tied=True),
    "tied, untrained": Case(tiny.qwen2(), lora(), FP16, tied=True),
    "tied, rows": Case(tiny.qwen2(), lora(trainable_token_indices=[7, 320]), BF16, tied=True),
    "tied, rows alone": Case(tiny.qwen2(), TrainableTokensConfig(token_indices=[7, 320]), FP32, tied=True),
    "gpt2, saved": Case(
        tiny.gpt2(), lora(target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["wte", "lm_head"]), BF16
    ),
    "gpt2, untrained": Case(tiny.gpt2(), lora(target_modules=["c_attn"], fan_in_fan_out=True), FP16, tied=True),
    "bias": Case(phi(), lora(modules_to_save=list(BOTH)), FP32),
    "t5, untrained": Case(t5(), lora(target_modules=["q", "v"]), BF16, tied=True, auto=AutoModelForSeq2SeqLM),
}


def save_base(directory: Path, case: Case) -> Path:
    torch.manual_seed(11)
    model = case.auto.from_config(case.config, dtype=case.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.05)
    model.save_pretrained(directory, max_shard_size=case.shard_size)
    return directory


def resized(base: Path, case: Case) -> Any:
    """Load and resize the base as users do. The added rows are random, and differ each time."""
    model = case.auto.from_pretrained(base, dtype="auto")
    model.resize_token_embeddings(NEW, pad_to_multiple_of=None if case.num_rows == NEW else 64)
    assert model.get_input_embeddings().weight.shape[0] == case.num_rows
    return model


def save_adapter(directory: Path, base: Path, case: Case) -> Path:
    torch.manual_seed(5)
    model = get_peft_model(resized(base, case), case.settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape).to(parameter.dtype)
                parameter.mul_(1 + 0.1 * noise) if "magnitude" in name else parameter.add_(0.05 * noise)
    if case.file_dtype is not None:
        model.to(case.file_dtype)
    return tiny.save_peft(model, directory, **case.save)


def saved(directory: Path, name: str) -> tuple[Path, Path]:
    case = CASES[name]
    base = save_base(directory / "base", case)
    return base, save_adapter(directory / "adapter", base, case)


def merge(base: Path, adapter: Path, max_shard_bytes: int = 1 << 30) -> Path:
    output = base.with_name("merged")
    merge_adapter(MergeOptions(base, (adapter,), output, None, max_shard_bytes))
    return output


def peft_merged(base: Path, adapter: Path, case: Case) -> dict[str, torch.Tensor]:
    merged = PeftModel.from_pretrained(resized(base, case), adapter).merge_and_unload(safe_merge=False)
    return dict(merged.state_dict())


def edit_adapter(adapter: Path, edit: Any) -> None:
    tensors = load_file(adapter / ADAPTER_FILE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, adapter / ADAPTER_FILE, {"format": "pt"})


@pytest.mark.parametrize("name", CASES)
def test_the_merge_is_pefts_into_the_resized_model_and_passes_its_verification(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    base, adapter = saved(tmp_path, name)
    before = moe.load_weights(base)
    output = merge(base, adapter, 100_000 if case.shard_size != "1GB" else 1 << 30)
    values, expected = moe.load_weights(output), peft_merged(base, adapter, case)
    head = "embed_out.weight" if "embed_out.weight" in expected else "lm_head.weight"
    embedding = next(name for name in values if name.endswith(("embed_tokens.weight", "wte.weight", "shared.weight")))
    assert (head in values) is not case.tied
    assert before.keys() <= values.keys() <= {*expected, *before}
    wrong = [name for name in values if values[name].dtype != before.get(name, before[embedding]).dtype]
    assert wrong == []
    assert [name for name in values if not torch.equal(values[name], expected[name].to(values[name].dtype))] == []
    assert values[embedding].shape[0] == case.num_rows
    assert {values[name].shape for name in values if name.endswith("lm_head.bias")} <= {(case.num_rows,)}

    config = json.loads((output / "config.json").read_text())
    assert config["vocab_size"] == case.num_rows
    assert json.loads((base / "config.json").read_text())["vocab_size"] == OLD
    loaded = case.auto.from_pretrained(output, dtype="auto")
    assert loaded.get_input_embeddings().weight.shape == loaded.get_output_embeddings().weight.shape == values[embedding].shape
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) is case.tied

    gate = GATES[str(case.dtype).removeprefix("torch.")]
    report = tiny.verified(base, adapter, output, gate=gate, prompts=PROMPTS)
    assert report.faults == ()
    assert report.logits is not None
    assert report.logits.effect_mean_kl > 100 * report.logits.mean_kl


@pytest.mark.parametrize(
    ("name", "tensor", "row"),
    [
        ("saved", "model.embed_tokens.weight", 321),
        ("saved", "lm_head.weight", NEW - 1),
        ("rows", "model.embed_tokens.weight", 322),
        ("rows", "lm_head.weight", 320),
        ("adapted", "lm_head.weight", 323),
        ("adapted", "model.embed_tokens.weight", 320),
        ("tied, rows", "model.embed_tokens.weight", 324),
        ("bias", "lm_head.bias", 325),
    ],
)
def test_verification_finds_damage_in_an_added_row(name: str, tensor: str, row: int, tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, name)
    output = merge(base, adapter)
    tensors = load_file(output / "model.safetensors")
    tensors[tensor][row] += 1
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    (output / "manifest.json").unlink()
    gate = GATES[str(CASES[name].dtype).removeprefix("torch.")]
    report = tiny.verified(base, adapter, output, gate=gate, prompts=PROMPTS)
    assert [fault for fault in report.faults if tensor in fault] != []


def test_verification_finds_a_config_of_the_old_size(tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, "saved")
    output = merge(base, adapter)
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps({**config, "vocab_size": OLD}))
    (output / "manifest.json").unlink()
    report = tiny.verified(base, adapter, output, prompts=PROMPTS)
    assert "vocab_size" in report.faults[0]


def test_prompts_without_data_hold_added_tokens(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", CASES["saved"])
    ordinary, more = default_prompts(base), default_prompts(base, NEW)
    assert more[:-1] == ordinary
    assert set(more[-1]) & set(range(OLD, NEW)) == set(range(OLD, NEW))
    assert max(more[-1]) < NEW
    assert min(more[-1]) < OLD


def test_the_text_part_of_a_larger_model_gets_the_size() -> None:
    nested = {"model_type": "gemma3", "text_config": {"vocab_size": 320, "hidden_size": 8}}
    assert vocabulary_settings(nested, 326) == {"text_config": {"vocab_size": 326, "hidden_size": 8}}
    assert vocabulary_settings({**nested, "vocab_size": 320}, 326)["vocab_size"] == 326
    assert vocabulary_settings({"vocab_size": 320}, 326) == {"vocab_size": 326}


def cut_to(num_rows: int, part: str = "") -> Any:
    """Return an edit that keeps the first rows of the embeddings, or of those whose names contain `part`."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor[:num_rows] for name, tensor in tensors.items() if tensor.shape[0] == NEW and part in name})

    return edit


def remove(end: str) -> Any:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "lm_head" in name and name.endswith(end)]:
            del tensors[name]

    return edit


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        *((name, cut_to(OLD - 1), r"319 rows, the base model has 320.*len\(tokenizer\) is more than 320")
          for name in ("saved", "rows", "adapted", "tied, rows alone")),
        ("saved", remove(""), r"326 rows.*lm_head\.weight.*modules_to_save"),
        ("saved", cut_to(OLD, "lm_head"), r"320.*326|326.*320"),
        ("bias", remove(".bias"), r"lm_head\.bias"),
    ],
)  # fmt: skip
def test_embeddings_that_shrank_or_did_not_grow_together_are_refused(name: str, edit: Any, words: str, tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, name)
    edit_adapter(adapter, edit)
    with pytest.raises(AdapterTensorError, match=words):
        merge(base, adapter)


@pytest.mark.parametrize(
    ("settings", "save", "words"),
    [
        (lora(target_modules=["embed_tokens"]), {}, r"lm_head\.weight.*Add lm_head to modules_to_save"),
        (TrainableTokensConfig(token_indices=[3, 321]), {}, r"lm_head\.weight.*Add lm_head to modules_to_save"),
        (lora(trainable_token_indices=[3, 321]), {"save_embedding_layers": False}, r"321.*320 rows.*save_embedding_layers=True"),
    ],
    ids=["adapted alone", "rows alone", "rows without their matrix"],
)
def test_what_peft_does_not_save_is_asked_for(settings: PeftConfig, save: dict[str, Any], words: str, tmp_path: Path) -> None:
    case = Case(tiny.llama(), settings, BF16, save=save)
    base = save_base(tmp_path / "base", case)
    adapter = save_adapter(tmp_path / "adapter", base, case)
    with pytest.raises(AdapterTensorError, match=words):
        merge(base, adapter)


def test_a_file_that_claims_a_billion_rows_is_refused_before_anything_of_its_size_happens(tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, "saved")
    rows = 10**9
    names = [f"{module}.{part}weight" for module in (INPUT, OUTPUT) for part in ("", "modules_to_save.")]
    num_bytes = rows * tiny.HIDDEN * 2
    header = {
        name: {"dtype": "BF16", "shape": [rows, tiny.HIDDEN], "data_offsets": [number * num_bytes, (number + 1) * num_bytes]}
        for number, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with (adapter / ADAPTER_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + len(names) * num_bytes)  # takes no space
        except OSError:
            pytest.skip("this file system has no files of that size")
    before, processor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, os.times().user
    with pytest.raises(AdapterTensorError, match=r"1000000000 rows.*at most 1048576"):
        merge(base, adapter)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert os.times().user - processor < 5
    assert list(tmp_path.glob("merged*")) == []


def write_tokenizer(directory: Path, num_tokens: int, *, num_added: int = 0, mark: str = "") -> None:
    """Write the tokens in the form of the tokenizers library's tokenizer.json."""
    vocabulary = {f"t{number}": number for number in range(num_tokens - num_added)}
    added = [{"id": number, "content": f"<{number}>", "special": True} for number in range(num_tokens - num_added, num_tokens)]
    tokenizer = {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"mark": mark}))


@pytest.mark.parametrize(
    ("of_adapter", "chosen"), [(None, "base"), (NEW - 1, "adapter"), (NEW, "adapter"), (300, "adapter"), (299, "base")]
)
def test_the_tokenizer_is_the_adapters_if_it_knows_as_many_tokens(
    of_adapter: int | None, chosen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, adapter = saved(tmp_path, "saved")
    write_tokenizer(base, 300, mark="base")
    if of_adapter is not None:
        write_tokenizer(adapter, of_adapter, num_added=6, mark="adapter")
    with caplog.at_level(logging.WARNING):
        output = merge(base, adapter)
    assert json.loads((output / "tokenizer_config.json").read_text())["mark"] == chosen
    assert (output / "tokenizer.json").read_bytes() == (tmp_path / chosen / "tokenizer.json").read_bytes()
    assert ("does not know the added tokens" in caplog.text) is (chosen == "base")


def test_a_tokenizer_with_tokens_that_have_no_row_is_refused(tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, "saved")
    write_tokenizer(base, 300)
    write_tokenizer(adapter, NEW + 1, num_added=7)
    with pytest.raises(UnsupportedAdapterError, match=r"327 tokens.*326 rows"):
        merge(base, adapter)
    assert list(tmp_path.glob("merged*")) == []


def test_tokens_are_counted_in_every_form_that_a_tokenizer_is_saved_in(tmp_path: Path) -> None:
    assert num_tokens(tmp_path) == 0
    (tmp_path / "added_tokens.json").write_text('{"<a>": 11}')
    assert num_tokens(tmp_path) == 12
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"12": {}, "3": {}}}')
    assert num_tokens(tmp_path) == 13
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", -1.0]] * 14}}))
    assert num_tokens(tmp_path) == 14
    (tmp_path / "tokenizer.json").write_text('{"model": "none"}')
    with pytest.raises(BrokenCheckpointError, match="tokenizer"):
        num_tokens(tmp_path)


@pytest.mark.parametrize("name", ["saved", "rows", "tied, untrained", "bias"])
def test_models_are_compared_at_the_new_size_however_they_are_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = saved(tmp_path, name)
    output = merge(base, adapter)
    comparisons = compare_logits([Reference(base, [adapter])], output, PROMPTS, tmp_path)
    monkeypatch.setattr(streaming, "MAX_WHOLE_BYTES", 0)
    comparisons += compare_logits([Reference(base, [adapter])], output, PROMPTS, tmp_path)
    gate = GATES[str(CASES[name].dtype).removeprefix("torch.")]
    assert [gate_failures(figures, gate) for figures in comparisons] == [(), ()]
    effects = [figures.effect_mean_kl for figures in comparisons]
    assert effects == pytest.approx([effects[0]] * 2, rel=0.02)
    assert effects[0] > 100 * comparisons[0].mean_kl


def test_a_merge_into_another_dtype_is_verified_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = saved(tmp_path, "saved")
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", "float32", 1 << 30))
    # 14 values: as many of the larger matrix take 57 bytes, which is no number of elements.
    monkeypatch.setattr(tensors, "READ_BYTES", 8 * 14)
    assert tensors.check_tensors(base, [adapter], tmp_path / "merged").faults == []


def test_equal_values_for_different_tokens_are_not_one_change(tmp_path: Path) -> None:
    case = Case(tiny.qwen2(), lora(trainable_token_indices={"embed_tokens": [3], "lm_head": [9]}), FP32)
    base = save_base(tmp_path / "base", case)
    adapter = save_adapter(tmp_path / "adapter", base, case)
    delta = f"{INPUT}.token_adapter.trainable_tokens_delta"
    values = load_file(adapter / ADAPTER_FILE)[delta]
    edit_adapter(adapter, lambda tensors: tensors.update({delta.replace(INPUT, OUTPUT): values.clone()}))
    merged = moe.load_weights(merge(base, adapter))
    changed = [
        row for row in range(NEW) if not torch.equal(merged["lm_head.weight"][row], merged["model.embed_tokens.weight"][row])
    ]
    assert changed == [3, 9]
    assert torch.equal(merged["model.embed_tokens.weight"][3], values[0])
    assert torch.equal(merged["lm_head.weight"][9], values[0])


@pytest.mark.parametrize(
    "settings", [lora(target_modules=["q_proj", "embed_tokens"]), lora(target_modules=list(BOTH), ensure_weight_tying=True)]
)
def test_an_adapted_tied_embedding_keeps_the_logits(settings: PeftConfig, tmp_path: Path) -> None:
    """PEFT's merge changes both, or changes them twice; see docs/explanation/decisions/0010-tied-weights.md."""
    case = Case(tiny.qwen2(), settings, BF16)
    base = save_base(tmp_path / "base", case)
    adapter = save_adapter(tmp_path / "adapter", base, case)
    output = merge(base, adapter)
    report = tiny.verified(base, adapter, output, prompts=PROMPTS)
    assert report.faults == ()
    assert moe.load_weights(output)["model.embed_tokens.weight"].shape[0] == NEW


@pytest.mark.parametrize("onto", [MergeBase.ORIGINAL, MergeBase.DEQUANTIZED])
def test_the_base_may_have_been_packed_in_training(onto: MergeBase, tmp_path: Path) -> None:
    packed = Quantization("nf4", double_quant=True, load_dtype="bfloat16", compute_dtype="bfloat16")
    base, adapter = saved(tmp_path, "saved")
    used = packed if onto is MergeBase.DEQUANTIZED else None
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30, used))
    assert moe.load_weights(tmp_path / "merged")["lm_head.weight"].shape[0] == NEW
    report = tiny.verified(base, adapter, tmp_path / "merged", quantization=packed, merged_onto=onto, prompts=PROMPTS)
    assert report.faults == ()


def test_the_text_part_of_a_model_of_images_and_text_grows(tmp_path: Path) -> None:
    name, settings = CONFIGS["gemma3"]
    torch.manual_seed(11)
    base = tmp_path / "base"
    getattr(transformers, name)(AutoConfig.for_model("gemma3", **settings)).to(BF16).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model.resize_token_embeddings(270)
    adapted = get_peft_model(model, lora(target_modules=["o_proj"], init_lora_weights=False))
    # PEFT does not see by itself that the size is another, because it does not look into text_config.
    tiny.save_peft(adapted, tmp_path / "adapter", save_embedding_layers=True)
    output = merge(base, tmp_path / "adapter")
    config = json.loads((output / "config.json").read_text())
    assert config["text_config"] == {**json.loads((base / "config.json").read_text())["text_config"], "vocab_size": 270}
    merged = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert torch.equal(merged.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert merged.get_input_embeddings().weight.shape[0] == 270


def test_one_adapter_grows_the_vocabulary_and_the_next_does_not(tmp_path: Path) -> None:
    base, first = saved(tmp_path, "saved")
    second = tiny.save_adapter(tmp_path / "second", base, lora(target_modules=["v_proj"]), seed=8)
    merge_adapter(MergeOptions(base, (first, second), tmp_path / "merged", None, 1 << 30))
    merged = moe.load_weights(tmp_path / "merged")
    expected = peft_merged(base, first, CASES["saved"])
    assert torch.equal(merged["lm_head.weight"], expected["lm_head.weight"])
    assert not torch.equal(merged["model.layers.0.self_attn.v_proj.weight"], expected["model.layers.0.self_attn.v_proj.weight"])
    report = tiny.verified(base, [first, second], tmp_path / "merged", prompts=PROMPTS)
    assert report.faults == ()
