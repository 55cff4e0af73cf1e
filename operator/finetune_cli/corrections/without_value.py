"""What a setting of another tool is here, if its name is asked for and no value is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_cli.corrections.other_tools import answer, first_name
from finetune_job.rules.rule import yaml_text

_SENTENCES: Mapping[str, str] = {
    "gradient_accumulation_steps": "Write microBatchSize x ranks x this number in spec.training.globalBatchSize: accumulation "
    "follows from it.",
    "warmup_steps": 'Write the share of all steps in spec.training.warmupRatio, such as "0.03".',
}
_SWITCHES = (
    *("gradient_checkpointing", "bf16", "fp16", "torch_compile", "use_wandb", "train_on_inputs", "assistant_only_loss"),
    *("completion_only_loss", "lora_target_linear", "use_dora", "load_in_4bit", "load_in_8bit"),
)
_VALUES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES, (True, False)),
    "lr_scheduler_type": ("cosine", "linear"),
    "optim": ("adamw_torch", "sgd"),
    "mixed_precision": ("bf16", "no"),
    "torch_dtype": ("bfloat16", "float32"),
    "bnb_4bit_compute_dtype": ("bfloat16", "float32"),
    "attn_implementation": ("flash_attention_2", "sdpa"),
    "quantization_bit": (4, 8),
    "report_to": ("wandb", "none"),
}
"""As people write them. The answer to every setting that is in neither table is the same whatever its value is."""


def answer_without_value(name: str) -> str:
    """In sentences; empty if no other tool is known to have such a setting."""
    known = first_name(name)
    if known is None:
        return ""
    if known in _SENTENCES:
        return _SENTENCES[known]
    told = [(f"for {name}: {yaml_text(value)}, ", value) for value in _VALUES.get(known, ())] or [("", None)]
    return " ".join(_sentence(f"{beginning}{_fix(name, value)}") for beginning, value in told)


def _fix(name: str, value: Any) -> str:
    found = answer(name, value, {})
    return "" if found is None else found.fix


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
