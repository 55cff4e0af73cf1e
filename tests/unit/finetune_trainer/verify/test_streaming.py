"""Logits with weights in memory one layer at a time: the whole model's bits, in memory that the model's size does not touch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

from bench.merge import model as bench_model
from finetune_job.api.method import MethodType
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.verify import streaming
from finetune_trainer.verify.logits import Reference, UnverifiableModelError, compare_logits, decoder_start, streamed_models
from finetune_trainer.verify.stored_weights import StoredWeights
from finetune_trainer.verify.streaming import Prompt, StreamedModel, _filled_up, batches
from tests.support.cases import table
from tests.unit.finetune_trainer.merge import tiny
from tests.unit.finetune_trainer.merge.test_non_lora import MERGED
from tests.unit.finetune_trainer.merge.test_non_lora import save_adapter as save_other_adapter
from tests.unit.finetune_trainer.verify import added_peak

PROMPTS = [[1, 5, 9, 20, 17, 33, 25, 4], [2, 3, 4], [30, 11, 12, 13, 9, 41]]
CASES: dict[str, tuple[str, dict[str, Any] | None, list[dict[str, Any]], str]] = table(__file__, "CASES")


def made(directory: Path, case: str) -> Reference:
    kind, settings, adapters, dtype_name = CASES[case]
    config, dtype = (
        getattr(tiny, kind)() if settings is None else AutoConfig.for_model(kind, **settings),
        getattr(torch, dtype_name),
    )
    auto = {"auto": AutoModelForSeq2SeqLM} if kind == "t5" else {}
    if kind == "t5":
        torch.manual_seed(3)
        base = directory / "base"
        AutoModelForSeq2SeqLM.from_config(config, dtype=dtype).save_pretrained(base)
    else:
        base = tiny.save_base(directory / "base", config, dtype)
    paths = [
        tiny.save_adapter(directory / f"adapter-{number}", base, LoraConfig(r=4, lora_alpha=8, **lora), seed=number, **auto)
        for number, lora in enumerate(adapters)
    ]
    return Reference(base, paths)


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded whole."""
    monkeypatch.setattr(streaming, "MAX_WHOLE_BYTES", 0)


def prompts_of(reference: Reference, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Prompt]:
    start = decoder_start(reference.base)
    return [Prompt(tuple(ids), None if start is None else (start, *ids[:-1])) for ids in prompts]


def streamed(reference: Reference, prompts: Sequence[Prompt]) -> list[list[torch.Tensor]]:
    """Logits of the base and of base + adapters."""
    return [[logits for batch in batches(prompts) for logits in model.logits(batch)] for model in streamed_models(reference)]


def by_the_libraries(reference: Reference, prompts: Sequence[Prompt]) -> list[list[torch.Tensor]]:
    """The same from models as users load them."""
    auto = AutoModelForCausalLM if prompts[0].decoder_ids is None else AutoModelForSeq2SeqLM
    found = []
    base = model = auto.from_pretrained(reference.base, dtype="auto")
    dtype = base.dtype
    for adapter in (None, *reference.adapters):
        if adapter is not None:
            model = PeftModel.from_pretrained(base, str(adapter))
        if adapter in (None, reference.adapters[-1]):
            found.append([logits.to(dtype) for batch in batches(prompts) for logits in logits_by_the_library(model, batch)])
        elif isinstance(model, PeftModel):
            base = model.merge_and_unload(safe_merge=False)
    return found


def logits_by_the_library(model: nn.Module, batch: Sequence[Prompt]) -> list[torch.Tensor]:
    given = {"input_ids": _filled_up([prompt.ids for prompt in batch])}
    if batch[0].decoder_ids is not None:
        given["decoder_input_ids"] = _filled_up([prompt.decoder_ids or () for prompt in batch])
    model.eval()
    with torch.inference_mode():
        logits = model(**given, use_cache=False).logits
    return [of_prompt[: prompt.num_positions] for of_prompt, prompt in zip(logits, batch, strict=True)]


def assert_same_bits(reference: Reference) -> None:
    prompts = prompts_of(reference)
    (base, adapted), expected = streamed(reference, prompts), by_the_libraries(reference, prompts)
    assert all(torch.equal(logits, other) for logits, other in zip(base + adapted, expected[0] + expected[1], strict=True))
    assert not all(torch.equal(logits, other) for logits, other in zip(base, adapted, strict=True))  # the adapter does something


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("case", CASES)
def test_logits_have_the_bits_of_whole_models(case: str, tmp_path: Path) -> None:
    assert_same_bits(made(tmp_path, case))


@pytest.mark.parametrize("case", ["llama dora after lora", "qwen2 tied with biases", "t5", "mixtral"])
def test_a_small_model_is_loaded_whole(case: str, tmp_path: Path) -> None:
    assert_same_bits(made(tmp_path, case))


@pytest.fixture(scope="module")
def base_with_biases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_base(tmp_path_factory.mktemp("biases") / "base", tiny.llama(attention_bias=True), torch.float32)


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("kind", MERGED)
def test_methods_outside_loras_family_have_the_bits_of_whole_models(kind: str, base_with_biases: Path, tmp_path: Path) -> None:
    adapter = save_other_adapter(tmp_path / "adapter", base_with_biases, MethodType(kind))
    assert_same_bits(Reference(base_with_biases, [adapter]))


@pytest.mark.usefixtures("by_layer")
def test_weights_are_read_once_for_all_prompts_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = StoredWeights.whole

    def whole(self: StoredWeights, path: str, dtype: torch.dtype) -> torch.Tensor:
        read.append(path)
        return original(self, path, dtype)

    monkeypatch.setattr(StoredWeights, "whole", whole)
    base, _ = streamed_models(made(tmp_path, "llama"))
    base.logits([Prompt((1, 2, 3)), Prompt((4, 5))])
    assert len(read) == len(set(read)) == 2 * 9 + 3


class BorrowsWeights(LlamaForCausalLM):
    """Uses a layer's weights without running the layer, as some models of remote code do."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = super().forward(*arguments, **named)
        output.logits = output.logits + self.model.layers[0].self_attn.q_proj.weight.sum()
        return output


def test_a_model_that_uses_weights_elsewhere_is_loaded_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = made(tmp_path, "llama")
    monkeypatch.setattr(
        "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content", {tiny.LlamaConfig: BorrowsWeights}
    )
    assert_same_bits(reference)
    monkeypatch.setattr(streaming, "MAX_WHOLE_BYTES", 1000)
    with pytest.raises(UnverifiableModelError, match=r"base cannot be verified on cpu \(weights are used outside of the layer"):
        compare_logits([reference], reference.base, [[1, 2, 3]], tmp_path)


@pytest.mark.usefixtures("by_layer")
def test_a_missing_weight_is_an_error_and_never_zero(tmp_path: Path) -> None:
    for model in streamed_models(made(tmp_path, "llama")):
        model.base.model.layers[1]._forward_pre_hooks.clear()
        with pytest.raises(RuntimeError, match="a weight is NaN"):
            model.logits([Prompt((1, 2))])


def test_prompts_of_similar_lengths_go_through_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MAX_BATCH_POSITIONS", 24)
    prompts = [Prompt((1,) * length) for length in (12, 3, 8, 40, 11, 6, 2)]
    assert [[prompt.num_positions for prompt in batch] for batch in batches(prompts)] == [[40], [12, 11], [8, 6], [3, 2]]
    # An encoder sees what is filled up: of encoder-decoders, only prompts of one length.
    prompts = [Prompt((1,) * length, (0,) * length) for length in (4, 5, 4)]
    assert [[prompt.num_positions for prompt in batch] for batch in batches(prompts)] == [[5], [4, 4]]


@pytest.mark.parametrize("case", ["llama", "gpt2", "t5"])
def test_what_a_prompt_is_filled_up_with_does_not_change_its_logits(case: str, tmp_path: Path) -> None:
    """One by one, each prompt gives what it gives among others, but for the order in which products add up."""
    reference = made(tmp_path, case)
    prompts = [prompt for batch in batches(prompts_of(reference)) for prompt in batch]
    together = streamed(reference, prompts)
    for number, prompt in enumerate(prompts):
        for among, (alone,) in zip(together, streamed(reference, [prompt]), strict=True):
            assert alone.shape == among[number].shape
            distance = (alone.float() - among[number].float()).abs().max()
            assert distance <= 4 * torch.finfo(alone.dtype).eps * alone.float().abs().max()


class OneDevice(TorchDispatchMode):
    """The meta device computes with tensors of a CPU, too; others do not."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {each.device.type for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.dim()}
        assert len(devices) <= 1 or function is torch.ops.aten.copy_.default, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_whole_bytes", [0, 1 << 30], ids=["by layer", "whole"])
def test_a_device_computes_all_of_it(max_whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without values every operation runs and none meets a tensor of the CPU, until a result is wanted."""
    monkeypatch.setattr(streaming, "MAX_WHOLE_BYTES", max_whole_bytes)
    # Both would have to read values.
    monkeypatch.setattr(streaming, "require_all_weights", lambda _logits: None)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda _positions: None)
    original = StreamedModel.logits

    def on_one_device(model: StreamedModel, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        with OneDevice():
            return original(model, prompts)

    monkeypatch.setattr(StreamedModel, "logits", on_one_device)
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.float32)
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj", "embed_tokens"], "modules_to_save": ["norm"]}
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(**lora))
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    reference = Reference(base, [adapter], device=torch.device("meta"))
    for model in streamed_models(reference):
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
            model.logits([Prompt((3, 4, 5))])
    with pytest.raises(UnverifiableModelError, match=r"merged cannot be verified on meta \(Cannot copy out of meta tensor"):
        compare_logits([reference], tmp_path / "merged", [[3, 4, 5]], tmp_path)


@pytest.mark.nightly
def test_memory_is_bounded_by_the_largest_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = made(tmp_path / "small", "llama")
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8}
    monkeypatch.setitem(bench_model.SIZES, "long", {**shape, "num_key_value_heads": 2, "vocab_size": 131072})
    base_bytes = bench_model.write_base(tmp_path / "base", "long")
    adapter_bytes = bench_model.write_adapter(tmp_path / "adapter", "long", tmp_path / "base")
    command = [sys.executable, "-m", added_peak.__name__, tmp_path / "base", tmp_path / "adapter", small.base, small.adapters[0]]
    measured = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    # Embeddings and head are 256 MiB each, and are never there together.
    assert base_bytes > 800 << 20
    assert int(measured) < (480 << 20) + 2 * adapter_bytes
