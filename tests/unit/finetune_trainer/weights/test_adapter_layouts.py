"""Adapters and models as other tools leave them: each is refused with what it is, and most with a command that converts it."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune_trainer.merge.inputs import MergeInputs
from finetune_trainer.weights import errors
from finetune_trainer.weights.headers import read_adapter, read_checkpoint, read_json

LAYER = "base_model.model.model.layers.0.q_proj"
PLAIN = (f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight", f"{LAYER}.lora_B.bias")
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
NAMES: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "compile had wrapped": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    ".compile had": lambda name: name.replace("base_model.", "base_model._orig_mod."),
    "FSDP": lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    "activation checkpointing": lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
    "DistributedDataParallel": lambda name: f"module.{name}",
    "PEFT twice": lambda name: f"base_model.model.{name}",
    "'default'": lambda name: re.sub(r"(lora_(?:A|B|embedding_A))", r"\1.default", name),
    "'my-adapter'": lambda name: re.sub(r"(lora_(?:A|B|embedding_A))", r"\1.my-adapter", name),
    "do not begin with": lambda name: name.removeprefix("base_model.model."),
}


@pytest.mark.parametrize("reason", NAMES)
def test_names_of_tensors_that_are_not_those_of_peft_are_converted_by_the_command_that_the_refusal_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = {name: torch.ones(2, 3) for name in (*PLAIN, EMBEDDING)}
    save_file({NAMES[reason](name): tensor for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(errors.BrokenCheckpointError, match="do not have the names that PEFT") as refused:
        read_adapter(tmp_path)
    assert reason in str(refused.value)
    command = str(refused.value).partition("Convert it in its directory: ")[2]
    exec(shlex.split(command)[2], {})
    assert set(read_adapter(tmp_path).tensors) == set(tensors)


@pytest.mark.parametrize("names", [PLAIN, (EMBEDDING,), ("prompt_embeddings",), ("base_model.model.score.weight",)])
def test_names_as_peft_writes_them_are_read(tmp_path: Path, names: tuple[str, ...]) -> None:
    save_file({name: torch.ones(2, 3) for name in names}, tmp_path / "adapter_model.safetensors")
    assert set(read_adapter(tmp_path).tensors) == set(names)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("adapter_model.bin", "adapter_model.bin is a pickle, which is never loaded here. Convert it"),
        ("adapter_model.pt", "adapter_model.pt is a pickle"),
        ("adapters.safetensors", "belongs to MLX"),
        ("adapters.npz", "belongs to MLX"),
        ("pytorch_lora_weights.safetensors", "belongs to diffusers"),
        ("adapter-f16.gguf", "a GGUF file, which llama.cpp reads"),
        ("checkpoint-20/adapter_config.json", "its directories do: checkpoint-20. Name one of them"),
        ("default/adapter_config.json", "its directories do: default"),
        ("config.json", "is a whole model, not an adapter"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/__0_0.distcp is a part of a sharded checkpoint of torch"),
        ("__0_0.distcp", "__0_0.distcp is a part of a sharded checkpoint of torch"),
        ("global_step20/mp_rank_00_model_states.pt", "global_step20 is a checkpoint of DeepSpeed"),
        ("iter_0000100/mp_rank_00/model_optim_rng.pt", "iter_0000100 is a checkpoint of Megatron"),
        ("model.nemo", "model.nemo is an archive of NeMo"),
        ("adapter_0.pt", "adapter_0.pt is of torchtune"),
        ("README.md", "Save the adapter with safe_serialization=True"),
    ],
)
def test_a_directory_without_weights_of_an_adapter_is_told_for_what_it_is(tmp_path: Path, file: str, words: str) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    (adapter / file).parent.mkdir(parents=True)
    (adapter / file).write_text("{}")
    base.mkdir()
    save_file({"model.norm.weight": torch.ones(2)}, base / "model.safetensors")
    with pytest.raises(errors.BrokenCheckpointError, match=re.escape(words)):
        MergeInputs.of(base, [adapter])


def test_parts_of_an_adapter_are_joined_by_the_command_that_the_refusal_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(PLAIN[:2], start=1):
        save_file({name: torch.ones(2, 3)}, tmp_path / f"adapter_model-0000{number}-of-00002.safetensors")
    with pytest.raises(errors.BrokenCheckpointError, match=r"is a part of an adapter\. Join the parts") as refused:
        read_adapter(tmp_path)
    exec(shlex.split(str(refused.value).partition("in that directory: ")[2])[2], {})
    assert set(read_adapter(tmp_path).tensors) == set(PLAIN[:2])


def test_tensors_that_were_not_gathered_from_the_ranks_are_recognised(tmp_path: Path) -> None:
    save_file({PLAIN[0]: torch.ones(2, 3), PLAIN[1]: torch.ones(0)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(errors.BrokenCheckpointError, match=r"lora_B.weight has no values: DeepSpeed ZeRO-3 or FSDP"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_A.reference.weight"), "several adapters (default, reference)"),
        ((f"{LAYER}.lora_A.default.weight", f"{LAYER}.base_layer.weight"), "weights of the base"),
    ],
)
def test_no_conversion_of_names_is_proposed_that_would_lose_or_mix_tensors(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    save_file({name: torch.ones(2, 3) for name in names}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(errors.BrokenCheckpointError, match=re.escape(words)) as refused:
        read_adapter(tmp_path)
    assert "selected_adapters=['default']" in str(refused.value)
    assert "python -c" not in str(refused.value)


def test_matrices_of_mlx_are_not_taken_for_those_of_peft(tmp_path: Path) -> None:
    save_file({"model.layers.0.self_attn.q_proj.lora_a": torch.ones(3, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(errors.BrokenCheckpointError, match="have the names of MLX, and are transposed"):
        read_adapter(tmp_path)


def test_an_adapter_in_place_of_a_base_is_told_with_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(errors.BrokenCheckpointError, match=r"is an adapter and not a model. Name its base \('org/base'"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pointer_of_git_lfs_is_told_for_what_it_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    with pytest.raises(errors.BrokenCheckpointError, match=r"is a pointer of Git LFS .*git lfs pull"):
        read_checkpoint(tmp_path) if name == "model.safetensors" else read_json(path)
