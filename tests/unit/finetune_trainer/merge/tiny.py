"""Tiny base models and adapters on disk for merge and verification tests, and PEFT's own merge of them as the oracle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.verify.gate import GATES
from finetune_trainer.verify.report import VerificationReport
from finetune_trainer.verify.verification import verify_merge

VOCABULARY = 320
PROMPTS = [[1, 5, 9, 200, 17, 33, 250, 4], [2, 3, 4], [300, 11, 12, 13, 90, 91]]
HIDDEN = 96
"""This is no multiple of usual vector widths times unroll factors, so that kernels also compute remainders."""


def llama(**changes: Any) -> PreTrainedConfig:
    """Return two layers whose MLP has more rows than one block of a matrix product, with a remainder."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=600,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=64,
        **changes,
    )


def gpt2() -> PreTrainedConfig:
    return GPT2Config(vocab_size=VOCABULARY, n_embd=160, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)


def qwen2() -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=544,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


def save_base(directory: Path, config: PreTrainedConfig, dtype: torch.dtype, max_shard_size: str = "1GB") -> Path:
    """Save a base model with random weights and biases."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.05)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def save_adapter(
    directory: Path,
    base: Path,
    settings: PeftConfig,
    adapter_dtype: torch.dtype | None = None,
    seed: int = 5,
    auto: Any = AutoModelForCausalLM,
    num_rows: int | None = None,
) -> Path:
    """Save an adapter whose trainable tensors differ from their initial values, as after training.

    adapter_dtype: dtype of the file; None: the dtype in which PEFT trains. auto: loads the base. num_rows: number of rows to
    which its embeddings are resized before; None: they are not resized.
    """
    loaded = auto.from_pretrained(base)
    if num_rows is not None:
        loaded.resize_token_embeddings(num_rows)
    model = get_peft_model(loaded, settings)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, dtype=torch.float32)
                if "magnitude" in name:
                    parameter.mul_(1 + 0.1 * noise.to(parameter.dtype))
                else:
                    parameter.add_(0.05 * noise.to(parameter.dtype))
    if adapter_dtype is not None:
        model.to(adapter_dtype)
    return save_peft(model, directory)


def save_peft(model: Any, directory: Path, **settings: Any) -> Path:
    """Save a model with PEFT, but without the card for the Hub, which takes longer than a tiny adapter."""
    model.create_or_update_model_card = lambda _: None
    model.save_pretrained(directory, **settings)
    return directory


def merged(base: Path, *adapters: Path, dtype: str | None = None, quantization: Quantization | None = None) -> Path:
    """Merge into a directory next to the base, and return it."""
    output = base.with_name("merged")
    merge_adapter(MergeOptions(base, adapters, output, dtype, 1 << 30, quantization))
    return output


def verified(base: Path, adapters: Path | Sequence[Path], merged: Path, **settings: Any) -> VerificationReport:
    """Verify a merge, with some prompts and the gate of bfloat16 if no others are given."""
    given = {"prompts": PROMPTS, "gate": GATES["bfloat16"], "report_path": merged.with_suffix(".json"), **settings}
    return verify_merge(base=base, adapters=[adapters] if isinstance(adapters, Path) else adapters, merged=merged, **given)


def peft_merged(base: Path, adapter: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return the state dict of PEFT's own merge with default options, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto")
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=False)
    state: dict[str, torch.Tensor] = {name: tensor.clone() for name, tensor in merged.state_dict().items()}
    return state
