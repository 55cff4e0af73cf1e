"""Logits with weights in memory one module at a time: the whole model's bits, in memory that the model's size does not touch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    ApertusConfig,
    AutoModelForSeq2SeqLM,
    DeepseekV4Config,
    GemmaConfig,
    JetMoeConfig,
    Lfm2MoeConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    T5Config,
)

from bench.merge import model as bench_model
from finetune_job.api.method import MethodType
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.verify import head_in_blocks, streaming
from finetune_trainer.verify import logits as logits_module
from finetune_trainer.verify.logits import (
    ADAPTED,
    BASE,
    Reference,
    _decoder_start,
    _prompt,
    _StreamedOrWholeModels,
    _waves,
    _WholeModels,
    compare_logits,
)
from finetune_trainer.verify.logits_of_each import logits_of_each
from finetune_trainer.verify.stored_weights import StoredWeights
from finetune_trainer.verify.streaming import NotStreamableError, Prompt, UnverifiableModelError, batches
from tests.support.forked_ranks import run_processes
from tests.unit.finetune_trainer.merge import tiny
from tests.unit.finetune_trainer.merge.test_non_lora import MERGED
from tests.unit.finetune_trainer.merge.test_non_lora import save_adapter as save_other_adapter
from tests.unit.finetune_trainer.verify.added_peak import write_added_peak

PROMPTS = [[1, 5, 9, 20, 17, 33, 25, 4], [2, 3, 4], [30, 11, 12, 13, 9, 41]]
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 64,
}  # fmt: skip
T5 = T5Config(vocab_size=320, d_model=96, d_kv=24, d_ff=200, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0)
ALL = {"target_modules": "all-linear"}
CASES: dict[str, tuple[PreTrainedConfig, list[dict[str, Any]], torch.dtype]] = {
    "llama": (tiny.llama(), [ALL], torch.bfloat16),
    "llama dora and embeddings": (
        tiny.llama(),
        [{"target_modules": ["embed_tokens", "up_proj"], "use_dora": True}],
        torch.float32,
    ),
    "llama adapted head": (tiny.llama(), [{"target_modules": ["lm_head", "embed_tokens"]}], torch.bfloat16),
    "llama saved head": (tiny.llama(), [{"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}], torch.float16),
    "llama trained tokens": (tiny.llama(), [{"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]}], torch.bfloat16),
    "llama two adapters": (
        tiny.llama(),
        [ALL, {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True}],
        torch.float32,
    ),
    "llama dora after lora": (tiny.llama(), [ALL, {**ALL, "use_dora": True}], torch.bfloat16),
    "qwen2 tied with biases": (tiny.qwen2(), [{"target_modules": ["q_proj", "embed_tokens"], "bias": "all"}], torch.bfloat16),
    "gemma tied": (GemmaConfig(**SIZES), [ALL], torch.float16),
    "gpt2": (tiny.gpt2(), [{"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}], torch.float16),
    "mamba, whose logits are float32": (
        MambaConfig(vocab_size=320, hidden_size=32, state_size=8, num_hidden_layers=2),
        [{"target_modules": ["in_proj"]}],
        torch.float16,
    ),
    "t5": (T5, [{"target_modules": ["q", "wo"], "task_type": "SEQ_2_SEQ_LM"}], torch.float16),
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=4),
        [{"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}],
        torch.bfloat16,
    ),
    "qwen3 moe": (
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=100),
        [{"target_parameters": ["experts.down_proj"], "target_modules": []}],
        torch.float32,
    ),
    "apertus, which has buffers of one value": (ApertusConfig(**SIZES), [ALL], torch.bfloat16),
    "olmo hybrid, whose convolutions are stored in three": (
        OlmoHybridConfig(**SIZES, pad_token_id=0, layer_types=["linear_attention", "full_attention"]),
        [{"target_modules": ["q_proj", "up_proj"]}],
        torch.float32,
    ),
    "deepseek v4, which has buffers of integers": (
        DeepseekV4Config(
            **SIZES | {"num_key_value_heads": 1, "head_dim": 32},
            q_lora_rank=16,
            o_groups=2,
            o_lora_rank=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
            mlp_layer_types=["hash_moe", "moe"],
            index_n_heads=2,
            index_head_dim=16,
            index_topk=4,
            sliding_window=16,
            partial_rotary_factor=0.5,
        ),
        [{"target_modules": ["q_a_proj"]}],
        torch.float32,
    ),
    "lfm2 moe, whose convolutions are used outside of their modules": (
        Lfm2MoeConfig(
            **{name: size for name, size in SIZES.items() if name != "head_dim"},
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=104,
            layer_types=["conv", "full_attention"],
            num_dense_layers=1,
        ),
        [{"target_modules": ["q_proj", "in_proj", "w1"]}],
        torch.bfloat16,
    ),
    "jetmoe, whose experts are used outside of their modules": (
        JetMoeConfig(**{name: size for name, size in SIZES.items() if name != "head_dim"}, kv_channels=24),
        [{"target_modules": ["kv_proj"]}],
        torch.float32,
    ),
}


def made(directory: Path, case: str) -> Reference:
    config, adapters, dtype = CASES[case]
    if config is T5:
        torch.manual_seed(3)
        base = directory / "base"
        AutoModelForSeq2SeqLM.from_config(config, dtype=dtype).save_pretrained(base)
    else:
        base = tiny.save_base(directory / "base", config, dtype)
    auto = {"auto": AutoModelForSeq2SeqLM} if config is T5 else {}
    paths = [
        tiny.save_adapter(directory / f"adapter-{number}", base, LoraConfig(r=4, lora_alpha=8, **settings), seed=number, **auto)
        for number, settings in enumerate(adapters)
    ]
    return Reference(base, paths)


def both_ways(
    reference: Reference, directory: Path, prompts: Sequence[Sequence[int]] = PROMPTS
) -> tuple[list[bytes], list[bytes]]:
    """The files of logits from streaming and from whole models."""
    start = _decoder_start(reference.base)
    given = [_prompt(prompt, start) for prompt in prompts]
    found = []
    for kind in ("streamed", "whole"):
        (directory / kind).mkdir()
        models = (
            _StreamedOrWholeModels(reference, (BASE, ADAPTED), directory)
            if kind == "streamed"
            else _WholeModels(reference, (BASE, ADAPTED), "for comparison")
        )
        (files,) = logits_of_each([models], given, directory / kind)
        found.append([path.read_bytes() for label in (BASE, ADAPTED) for path in files[label]])
        assert getattr(models, "_whole", None) is None
    assert found[0][: len(prompts)] != found[0][len(prompts) :]  # the adapter does something
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES)
def test_logits_have_the_bits_of_whole_models(case: str, tmp_path: Path) -> None:
    streamed, whole = both_ways(made(tmp_path, case), tmp_path)
    assert streamed == whole


@pytest.fixture(scope="module")
def base_with_biases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_base(tmp_path_factory.mktemp("biases") / "base", tiny.llama(attention_bias=True), torch.float32)


@pytest.mark.parametrize("kind", MERGED)
def test_methods_outside_loras_family_have_the_bits_of_whole_models(kind: str, base_with_biases: Path, tmp_path: Path) -> None:
    base = base_with_biases
    adapter = save_other_adapter(tmp_path / "adapter", base, MethodType(kind))
    reference = Reference(base, [adapter])
    streamed, whole = both_ways(reference, tmp_path)
    assert streamed == whole


@pytest.mark.parametrize("case", ["llama", "llama adapted head", "qwen2 tied with biases", "t5"])
def test_a_large_head_goes_through_in_blocks(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_in_blocks, "HEAD_BLOCK_BYTES", 100 * 96 * 2)
    read: list[tuple[int, int]] = []
    original = StoredWeights.rows

    def rows(self: StoredWeights, path: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        read.append((first, last))
        return original(self, path, first, last, dtype)

    monkeypatch.setattr(StoredWeights, "rows", rows)
    streamed, whole = both_ways(made(tmp_path, case), tmp_path)
    assert read == [(0, 100), (100, 200), (200, 300), (300, 320)]  # once for all prompts, with the adapter and without
    assert streamed == whole


def test_weights_are_read_once_for_all_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = StoredWeights.whole

    def whole(self: StoredWeights, path: str, *arguments: Any) -> torch.Tensor:
        read.append(path)
        return original(self, path, *arguments)

    monkeypatch.setattr(StoredWeights, "whole", whole)
    reference = made(tmp_path, "llama")
    models = _StreamedOrWholeModels(reference, (BASE, ADAPTED), tmp_path)
    models.logits([Prompt(tuple(prompt)) for prompt in PROMPTS], tmp_path)
    assert len(read) == len(set(read)) == 2 * 9 + 2  # all but the embeddings, of which rows are read


class BorrowsWeights(LlamaForCausalLM):
    """Uses a layer's weights without running the layer, as some models of remote code do."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = super().forward(*arguments, **named)
        output.logits = output.logits + self.model.layers[0].self_attn.q_proj.weight.sum()
        return output


def test_a_model_that_cannot_be_streamed_is_loaded_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = made(tmp_path, "llama")
    monkeypatch.setattr(
        "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content",
        {tiny.LlamaConfig: BorrowsWeights},
    )
    models = _StreamedOrWholeModels(reference, (BASE, ADAPTED), tmp_path)
    (files,) = logits_of_each([models], [Prompt((1, 2, 3))], tmp_path)
    assert isinstance(models._whole, _WholeModels)  # type: ignore[attr-defined]
    assert files[ADAPTED][0].stat().st_size == 3 * 320 * 2
    monkeypatch.setattr(logits_module, "MAX_WHOLE_BYTES", 1000)
    with pytest.raises(UnverifiableModelError, match="cannot be verified layer by layer"):
        logits_of_each([_StreamedOrWholeModels(reference, (BASE, ADAPTED), tmp_path)], [Prompt((1, 2, 3))], tmp_path)


def test_a_missing_weight_is_an_error_and_never_zero(tmp_path: Path) -> None:
    reference = made(tmp_path, "llama")
    models = _StreamedOrWholeModels(reference, (BASE,), tmp_path)
    (streamed,) = models._streamed  # type: ignore[attr-defined]
    skeleton = streamed._models[BASE]
    skeleton.base.model.layers[1].mlp.up_proj._forward_pre_hooks.clear()
    with pytest.raises(NotStreamableError):
        streamed.logits([Prompt((1, 2))], tmp_path)


def test_a_token_that_no_prompt_holds_is_an_error(tmp_path: Path) -> None:
    reference = made(tmp_path, "llama")
    models = _StreamedOrWholeModels(reference, (BASE,), tmp_path)
    (streamed,) = models._streamed  # type: ignore[attr-defined]
    streamed._ids = frozenset((1, 2))
    embeddings = streamed._models[BASE].base.get_input_embeddings()
    with pytest.raises(NotStreamableError, match="other tokens"):
        streamed._check_ids(embeddings, (torch.tensor([[1, 2, 3]]),))
    with pytest.raises(ValueError, match="token id 320"):
        streamed.logits([Prompt((1, 320))], tmp_path)


def test_prompts_are_divided_into_waves_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_module, "MAX_WAVE_POSITIONS", 10)
    prompts = [Prompt((1,) * size) for size in (12, 4, 6, 1, 1, 1, 1, 10)]
    assert [[prompt.num_positions for prompt in wave] for wave in _waves(prompts)] == [[12], [4, 6], [1, 1, 1, 1], [10]]


def test_prompts_of_similar_lengths_go_through_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MAX_BATCH_POSITIONS", 24)
    lengths = (12, 3, 8, 40, 11, 6, 2)
    assert batches([Prompt((1,) * length) for length in lengths]) == [[3], [0, 4], [2, 5], [1, 6]]
    # An encoder sees what is filled up: of encoder-decoders, only prompts of one length.
    assert batches([Prompt((1,) * length, (0,) * length) for length in (4, 5, 4)]) == [[1], [0, 2]]


@pytest.mark.parametrize("case", ["llama", "gpt2", "t5"])
def test_what_a_prompt_is_filled_up_with_does_not_change_its_logits(case: str, tmp_path: Path) -> None:
    """One by one, each prompt gives what it gives among others, but for the order in which products add up."""
    reference = made(tmp_path, case)
    together, _ = both_ways(reference, tmp_path)
    dtype, start = CASES[case][2], _decoder_start(reference.base)
    for number, prompt in enumerate(PROMPTS):
        models = _StreamedOrWholeModels(reference, (BASE, ADAPTED), tmp_path)
        files = models.logits([_prompt(prompt, start)], tmp_path)
        for label, place in ((BASE, number), (ADAPTED, len(PROMPTS) + number)):
            alone = torch.frombuffer(bytearray(files[label][0].read_bytes()), dtype=dtype).float()
            among = torch.frombuffer(bytearray(together[place]), dtype=dtype).float()
            assert alone.shape == among.shape
            assert (alone - among).abs().max() <= 4 * torch.finfo(dtype).eps * alone.abs().max()


class OneDevice(TorchDispatchMode):
    """The meta device computes with tensors of a CPU, too; others do not."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {each.device.type for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.dim()}
        assert len(devices) <= 1 or function is torch.ops.aten.copy_.default, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_blocked_head", [False, True], ids=["whole head", "head in blocks"])
def test_a_device_computes_all_of_it_or_the_cpu_does(
    has_blocked_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a device without values every operation runs and none meets a tensor of the CPU, until a result is wanted."""
    if has_blocked_head:
        monkeypatch.setattr(head_in_blocks, "HEAD_BLOCK_BYTES", 1 << 12)
    # Both would have to read values.
    monkeypatch.setattr(streaming.StreamedModels, "_check_ids", lambda *_: None)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda _positions: None)
    original = streaming.logits_of

    def on_one_device(*args: Any) -> list[torch.Tensor]:
        with OneDevice():
            return original(*args)

    monkeypatch.setattr(streaming, "logits_of", on_one_device)
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.float32)
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj", "embed_tokens"], "modules_to_save": ["norm"]}
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(**lora))
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    (wanted,) = compare_logits([Reference(base, [adapter])], tmp_path / "merged", [[3, 4, 5]], tmp_path)
    assert not caplog.messages
    (found,) = compare_logits(
        [Reference(base, [adapter], device=torch.device("meta"))], tmp_path / "merged", [[3, 4, 5]], tmp_path
    )
    assert found == wanted
    told = [message for message in caplog.messages if "compared on the CPU, because on meta: " in message]
    assert [message.partition(": ")[0] for message in told] == [str(base), str(tmp_path / "merged")]
    assert all("Cannot copy out of meta tensor; no data!" in message for message in told)


def test_memory_is_bounded_by_neither_the_model_nor_its_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8}
    monkeypatch.setitem(bench_model.SIZES, "long", {**shape, "num_key_value_heads": 2, "vocab_size": 131072})
    base_bytes = bench_model.write_base(tmp_path / "base", "long")
    adapter_bytes = bench_model.write_adapter(tmp_path / "adapter", "long", tmp_path / "base")
    assert run_processes([partial(write_added_peak, tmp_path / "base", tmp_path / "adapter", tmp_path / "peak")]) == [0]
    # Embeddings and head are 256 MiB each: neither is ever whole.
    assert base_bytes > 600 << 20
    assert int((tmp_path / "peak").read_text()) < (280 << 20) + 2 * adapter_bytes
