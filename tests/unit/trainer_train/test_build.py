"""How the model is built changes nothing of what it is: loaded shard by shard, compiled, or recomputing its activations."""

from __future__ import annotations

import resource
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Gemma3nTextConfig

from finetune_job.api.training import ActivationCheckpointing
from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.model import sharded
from finetune_trainer.model.activations import checkpoint_activations
from finetune_trainer.model.kept_results import keeping_contexts
from finetune_trainer.model.load_shards import base_name
from finetune_trainer.ranks.gang import joined
from tests.support.forked_ranks import run_processes
from tests.support.method_settings import SETTINGS
from tests.support.small_gang import Unchanged
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama

TOKENS = torch.arange(60).view(2, 30) * 7 % 256
LORA = {"type": "LoRA", "lora": {"r": 4, "modulesToSave": ["lm_head"]}}
LORA_TIED = {"type": "LoRA", "lora": {"r": 4}}
DORA = {"type": "DoRA", "lora": {"r": 4}}
FULL = {"type": "Full", "lora": None}
FLAT = {"version": 1, "useOrigParams": True, "peftWrapPolicy": False}
BUILT: dict[str, tuple[dict[str, Any], dict[str, Any], int, torch.dtype, bool]] = {
    "lora-fsdp2": (LORA, {}, 3, torch.bfloat16, False),
    "dora-fsdp2-tied": (DORA, {}, 2, torch.bfloat16, True),
    "full-fsdp2-tied": (FULL, {}, 3, torch.bfloat16, True),
    "lora-fsdp1-tied": (LORA_TIED, FLAT, 2, torch.float32, True),
    "dora-fsdp1": (DORA, {"version": 1}, 3, torch.float32, False),
    "full-fsdp1": (FULL, {"version": 1}, 2, torch.bfloat16, False),
}

GEMMA_3N = Gemma3nTextConfig(
    vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size_per_layer_input=264, hidden_size_per_layer_input=8, laurel_rank=4, num_kv_shared_layers=0,
    altup_num_inputs=2, layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.0, 0.0],
)  # fmt: skip


def spec_of(method: dict[str, Any], fsdp: dict[str, Any], ranks: int, **training: Any) -> dict[str, Any]:
    return tiny_spec(
        method=method, parallelism={"processesPerNode": ranks, "fsdp": fsdp}, training={"globalBatchSize": 6, **training}
    )


def gang(body: Any, ranks: int, directory: Path, *arguments: Any) -> None:
    store = f"file://{directory}/store"
    assert run_processes([partial(body, rank, ranks, store, directory, *arguments) for rank in range(ranks)]) == [0] * ranks


@pytest.mark.parametrize("name", BUILT)
def test_a_model_loaded_by_shards_has_the_bytes_of_one_loaded_whole(tmp_path: Path, name: str) -> None:
    method, fsdp, ranks, dtype, tied = BUILT[name]
    base = write_tiny_llama(tmp_path / "base", dtype, tied)
    gang(_build_twice, ranks, tmp_path, spec_of(method, fsdp, ranks), base)


def _build_twice(rank: int, ranks: int, store: str, _: Path, spec: dict[str, Any], base: Path) -> None:
    found = []
    with joined(rank, ranks, rank, store) as joint:
        by_shard = sharded.hollow_base_model
        for load in (by_shard, lambda *_: None):
            sharded.hollow_base_model = load  # type: ignore[assignment]
            module = sharded.build(plan_of(spec), base, joint, Unchanged()).module
            found.append(
                {
                    piece.name: (piece.start, piece.holder.requires_grad, piece.parameter_values())
                    for piece in pieces(module, frozen=True)
                }
                | {f"buffer {name}": (0, False, buffer) for name, buffer in module.named_buffers()}
            )
    assert found[0].keys() == found[1].keys()
    assert by_shard(plan_of(spec), base) is not None
    for name, (start, trained, values) in found[0].items():
        assert (start, trained) == found[1][name][:2], name
        assert values.dtype is found[1][name][2].dtype, name
        assert torch.equal(values, found[1][name][2]), name


def test_a_rank_needs_memory_for_its_shard_and_not_for_the_model(tmp_path: Path) -> None:
    large = {"vocab_size": 4096, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 8}
    base = write_tiny_llama(tmp_path / "base", **large)
    num_bytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    gang(_measure, 2, tmp_path, spec_of({"type": "LoRA", "lora": {"r": 4}}, {}, 2), write_tiny_llama(tmp_path / "tiny"), base)
    for path in tmp_path.glob("peak-*"):
        # Half of the model, one layer and a block, where loading it whole takes all of it and the shard beside it.
        assert int(path.read_text()) < num_bytes


def _measure(rank: int, ranks: int, store: str, out: Path, spec: dict[str, Any], tiny: Path, base: Path) -> None:
    with joined(rank, ranks, rank, store) as joint:
        # What libraries allocate once is there before it is measured.
        sharded.build(plan_of(spec), tiny, joint, Unchanged())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trained = sharded.build(plan_of(spec), base, joint, Unchanged())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert trained.pieces
    (out / f"peak-{rank}").write_text(str(peak * 1024))


def test_the_base_models_name_of_a_parameter_inside_peft() -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj."
    assert base_name(f"{prefix}base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"
    assert base_name("base_model.model.lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert base_name("model.norm.weight") == "model.norm.weight"
    assert base_name(f"{prefix}lora_A.default.weight") == "model.layers.0.self_attn.q_proj.lora_A.weight"


def losses_and_gradients(rank: int, ranks: int, store: str, out: Path, spec: dict[str, Any], base: Path) -> None:
    with joined(rank, ranks, rank, store) as joint:
        trained = sharded.build(plan_of(spec), base, joint, Unchanged())
        logits = trained.module(input_ids=TOKENS, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        gradients = {piece.name: _gradient(piece.holder) for piece in trained.pieces if piece.stop > piece.start}
        torch.save((loss.detach(), gradients), out / f"found-{rank}")


def _gradient(holder: nn.Parameter) -> torch.Tensor:
    gradient = holder.grad
    assert gradient is not None
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def computed(directory: Path, base: Path, method: dict[str, Any], fsdp: dict[str, Any], **training: Any) -> list[Any]:
    directory.mkdir()
    ranks = 2
    gang(losses_and_gradients, ranks, directory, spec_of(method, fsdp, ranks, **training), base)
    return [torch.load(directory / f"found-{rank}") for rank in range(ranks)]


INSIDE_LAYERS = {"version": 2, "autoWrapPolicy": "SIZE_BASED_WRAP", "minNumParams": 1500}


@pytest.mark.parametrize("fsdp", [{"version": 2}, {"version": 1}, INSIDE_LAYERS], ids=["fsdp2", "fsdp1", "units inside layers"])
def test_recomputed_activations_give_the_same_gradients_bit_for_bit(tmp_path: Path, fsdp: dict[str, Any]) -> None:
    base = write_tiny_llama(tmp_path / "base")
    method = {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}} if fsdp["version"] == 2 else FULL
    expected = computed(tmp_path / "None", base, method, fsdp)
    for kind in ("Selective", "Full"):
        for (loss, gradients), (expected_loss, expected_gradients) in zip(
            computed(tmp_path / kind, base, method, fsdp, activationCheckpointing=kind), expected, strict=True
        ):
            assert torch.equal(loss, expected_loss)
            assert [name for name in expected_gradients if not torch.equal(gradients[name], expected_gradients[name])] == []


@pytest.mark.parametrize(
    ("method", "held"),
    [
        ({"type": "LoRA", "lora": {"r": 4, "trainableTokenIndices": [3, 5]}}, torch.bfloat16),
        ({"type": "QLoRA", "lora": {"r": 4}}, torch.bfloat16),
        (FULL, torch.float32),
    ],
    ids=["rows", "qlora", "full"],
)
def test_one_rank_holds_a_frozen_base_in_the_16_bit_type_of_the_computation(
    tmp_path: Path, method: dict[str, Any], held: torch.dtype
) -> None:
    from finetune_trainer.ranks.gang import Gang

    base = write_tiny_llama(tmp_path / "base", torch.float16)
    plan = plan_of(spec_of(method, {}, 1, precision="bf16"))
    trained = sharded.build(plan, base, Gang(0, 1, 0, torch.device("cpu"), None), Unchanged())
    assert trained.autocast is torch.bfloat16
    assert {parameter.dtype for name, parameter in trained.module.named_parameters() if "norm" in name} == {held}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = trained.module(input_ids=TOKENS, use_cache=False).logits
    functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten()).backward()
    gradients = [parameter.grad for parameter in trained.module.parameters() if parameter.requires_grad]
    assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)
    assert any(gradient is not None and bool(gradient.ne(0).any()) for gradient in gradients)


def test_selective_recomputation_repeats_no_matrix_product(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base")
    counts = {kind: products(base, kind) for kind in ("None", "Selective", "Full")}
    assert counts["Selective"] == counts["None"] < counts["Full"]


@pytest.mark.parametrize("method", ["C3A", "GraLoRA", "LoHa"])
def test_what_is_kept_does_not_hold_what_an_adapter_adds_in_place(tmp_path: Path, method: str) -> None:
    base = write_tiny_llama(tmp_path / "base")
    plain, kept = (adapter_gradients(base, method, kind) for kind in ("None", "Selective"))
    assert any(bool(values.any()) for values in plain.values())
    for name, values in plain.items():
        assert torch.allclose(kept[name], values, rtol=1e-4, atol=1e-6), name


def test_what_is_kept_does_not_hold_what_a_model_adds_in_place() -> None:
    """Gemma 3n adds per-layer inputs to a product's result."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GEMMA_3N)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    found = []
    for kind in (ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE):
        checkpoint_activations(model.train(), kind)
        model.zero_grad()
        model(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    plain, kept = found
    assert kept.keys() == plain.keys()
    assert [name for name, values in plain.items() if not torch.allclose(kept[name], values, rtol=1e-4, atol=1e-6)] == []


def test_attention_that_draws_random_numbers_is_not_kept() -> None:
    """The second pass begins with the first one's generator; numbers that a kept result does not draw would shift the next."""
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    query = torch.empty(1, 2, 8, 16, device="meta")
    for dropout, is_kept in ((0.0, True), (0.1, False)):
        keep, _ = keeping_contexts()
        with keep:
            attention(query, query, query, None, True, dropout)
        assert bool(keep.kept) == is_kept


def test_what_is_kept_serves_one_backward_pass() -> None:
    layer, inputs = nn.Linear(4, 4), torch.ones(2, 4)
    loss = checkpoint(lambda given: layer(layer(given).relu()), inputs, use_reentrant=False, context_fn=keeping_contexts).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="serve one backward pass"):
        loss.backward()


def adapter_gradients(base: Path, method: str, kind: str) -> dict[str, torch.Tensor]:
    from finetune_trainer.ranks.gang import Gang

    spec = spec_of({"type": method, "settings": SETTINGS[method]}, {}, 1, activationCheckpointing=kind)
    module = sharded.build(plan_of(spec), base, Gang(0, 1, 0, torch.device("cpu"), None), Unchanged()).module
    generator = torch.Generator().manual_seed(1)
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for each in trained.values():
            each.add_(torch.randn(each.shape, generator=generator), alpha=0.1)
    module(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
    return {name: each.grad for name, each in trained.items() if each.grad is not None}


def products(base: Path, kind: str) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    from finetune_trainer.ranks.gang import Gang

    spec = spec_of({"type": "LoRA", "lora": {"r": 4}}, {}, 1, activationCheckpointing=kind)
    trained = sharded.build(plan_of(spec), base, Gang(0, 1, 0, torch.device("cpu"), None), Unchanged())
    with FlopCounterMode(display=False) as counter:
        trained.module(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler, and none is installed")
def test_compiled_layers_give_the_same_loss_and_gradients(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base")
    expected = computed(tmp_path / "plain", base, LORA_TIED, {})
    found = computed(tmp_path / "compiled", base, LORA_TIED, {}, compile=True)
    for (loss, gradients), (expected_loss, expected_gradients) in zip(found, expected, strict=True):
        assert torch.allclose(loss, expected_loss, rtol=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        for name, values in expected_gradients.items():
            assert torch.allclose(gradients[name], values, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("fsdp", [{"version": 1}, FLAT, {}])
def test_the_first_pass_of_a_process_is_as_any_other(tmp_path: Path, fsdp: dict[str, Any]) -> None:
    """FSDP 1 leaves other element types behind than it finds, and dropout rounds in the type that it is given."""
    base = write_tiny_llama(tmp_path / "base", torch.bfloat16)
    method = {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}}
    gang(_same_pass_twice, 2, tmp_path, spec_of(method, {**fsdp, "mixedPrecision": {"paramDtype": "bfloat16"}}, 2), base)


def _same_pass_twice(rank: int, ranks: int, store: str, _: Path, spec: dict[str, Any], base: Path) -> None:
    with joined(rank, ranks, rank, store) as joint:
        model = sharded.build(plan_of(spec), base, joint, Unchanged())
        with torch.no_grad():
            for piece in model.pieces:
                if "lora_B" in piece.name:
                    piece.parameter_values().normal_(generator=torch.Generator().manual_seed(3))
        found = []
        for _step in range(2):
            torch.manual_seed(7)
            with torch.autocast("cpu", dtype=model.autocast) if model.autocast else nullcontext():
                logits = model.module(input_ids=TOKENS, use_cache=False).logits.float()
            logits.square().mean().backward()
            found.append(logits.detach())
    assert torch.equal(*found)
