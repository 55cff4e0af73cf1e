"""`python -m finetune_cli.generate_coming_from > docs/reference/coming-from.md`: settings of other tools, and our answers.

The right column is the answer that `finetune validate` gives if such a setting is in a manifest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from finetune_cli.corrections.foreign import answer
from finetune_cli.corrections.table import answer_to

_TRAINER: Mapping[str, Any] = {
    "learning_rate": "2e-4", "num_train_epochs": 3, "max_steps": 500, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8, "lr_scheduler_type": "cosine", "warmup_steps": 10, "warmup_ratio": "0.03",
    "weight_decay": "0.01", "max_grad_norm": "1.0", "optim": "adamw_torch_fused", "bf16": True, "tf32": True,
    "gradient_checkpointing": True, "torch_compile": True, "deepspeed": "zero3.json", "fsdp_sharding_strategy": "FULL_SHARD",
    "logging_steps": 10, "save_steps": 100, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 100,
    "resume_from_checkpoint": True, "report_to": "wandb", "seed": 42, "output_dir": "outputs/run",
}  # fmt: skip
"""Settings of transformers' TrainingArguments."""
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "axolotl": {
        "base_model": "org/name", "adapter": "lora", "load_in_4bit": True, "load_in_8bit": True, "lora_r": 16, "lora_alpha": 32,
        "lora_dropout": "0.05", "lora_target_modules": ["q_proj", "v_proj"], "lora_target_linear": True,
        "lora_modules_to_save": ["embed_tokens"], "lora_model_dir": "outputs/run", "train_on_inputs": True,
        "tokens": ["[TOOL]"],
        "val_set_size": "0.05", "sequence_len": 4096, "sample_packing": True, "pad_to_sequence_len": True,
        "dataset_prepared_path": "prepared", "micro_batch_size": 2, "gradient_accumulation_steps": 8, "num_epochs": 3,
        "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "learning_rate": "2e-4",
        "warmup_steps": 10, "bf16": True, "flash_attention": True,
        "gradient_checkpointing": True, "deepspeed": "zero3.json", "context_parallel_size": 2, "rl": "dpo",
        "saves_per_epoch": 1, "evals_per_epoch": 4, "logging_steps": 1, "wandb_project": "tuning", "hub_model_id": "org/tuned",
        "output_dir": "outputs/run",
    },
    "LLaMA-Factory": {
        "model_name_or_path": "org/name", "trust_remote_code": True, "stage": "sft", "finetuning_type": "lora",
        "quantization_bit": 4, "quantization_type": "nf4", "double_quantization": True, "lora_rank": 8, "lora_alpha": 16,
        "lora_target": "all", "additional_target": "embed_tokens", "use_dora": True, "adapter_name_or_path": "saves/run",
        "dataset": "sets/chat", "template": "llama3", "train_on_prompt": True, "cutoff_len": 2048, "packing": True,
        "max_samples": 1000, "preprocessing_num_workers": 16, "val_size": "0.1", "flash_attn": "fa2",
        "overwrite_output_dir": True, "plot_loss": True, "add_tokens": "[A],[B]", "add_special_tokens": "[TOOL]",
        "resize_vocab": True,
        **{name: _TRAINER[name] for name in (
            "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "num_train_epochs",
            "lr_scheduler_type", "warmup_ratio", "bf16", "deepspeed", "logging_steps", "save_steps", "report_to")},
    },
    "TRL and PEFT": {
        "model_name_or_path": "org/name", "dtype": "bfloat16", "attn_implementation": "flash_attention_2",
        "dataset_name": "org/set", "dataset_text_field": "text", "max_length": 2048, "packing": True,
        "assistant_only_loss": True, "completion_only_loss": True, "use_liger_kernel": True, "loss_type": "dpo",
        "r": 16, "lora_alpha": 32, "lora_dropout": "0.05", "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["embed_tokens"], "use_rslora": True, "use_dora": True, "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", **_TRAINER,
    },
}  # fmt: skip
"""Tool -> its setting -> a value as people write it."""
SAME_NAME: Mapping[str, str] = {
    "learning_rate": "training.learningRate", "weight_decay": "training.weightDecay", "max_steps": "training.maxSteps",
    "max_grad_norm": "training.maxGradNorm", "warmup_ratio": "training.warmupRatio", "seed": "training.seed",
    "micro_batch_size": "training.microBatchSize", "lora_alpha": "method.lora.loraAlpha",
    "lora_dropout": "method.lora.loraDropout", "target_modules": "method.lora.targetModules",
    "modules_to_save": "method.lora.modulesToSave", "use_rslora": "method.lora.useRslora", "r": "method.lora.r",
    "packing": "data.packing", "optimizer": "training.optimizer",
}  # fmt: skip
"""Settings that are called the same here, but for the spelling: `finetune validate --fix` writes them in camelCase."""
WRITTEN: Mapping[str, Any] = {"training": {"microBatchSize": 2, "maxSteps": 500}, "parallelism": {"processesPerNode": 1}}
"""Other settings of the spec, on which some answers depend."""
_HEAD = """<!-- Generated by `python -m finetune_cli.generate_coming_from > docs/reference/coming-from.md`; do not edit. -->
# Coming from axolotl, LLaMA-Factory or TRL

Paste a setting of theirs under `spec` of a manifest: `finetune validate` says what it is here, and `finetune validate --fix`
writes what is certain to mean the same. The tables below are its answers. Method and data differ most:

* The number of GPUs is part of the manifest (`spec.parallelism`), not of the launcher, and the batch of a step is
  `spec.training.globalBatchSize`, whatever the number of ranks. Accumulation follows from both.
* What records are called is `spec.data.mapping`, with the presets `Alpaca` and `ShareGPT`
  ([training.md](../how-to/training.md#records)). Held-out records are a source of their own; nothing is split off.
* Memory settings that are left open are chosen so that the job fits; other settings are never changed.
* Merging and its verification belong to the run.

## By commands

| | axolotl | LLaMA-Factory | TRL | here |
|---|---|---|---|---|
| check the settings | | | | `finetune validate -f job.yaml` |
| look at what is learnt | `axolotl preprocess config.yml --debug` | | | `finetune data -f job.yaml` |
| memory | | | `accelerate estimate-memory MODEL`, of the weights | `finetune estimate -f job.yaml`, of a rank |
| try it before a GPU is held | | | | `finetune rehearse job.yaml` |
| train on one machine | `axolotl train config.yml` | `llamafactory-cli train config.yaml` | `trl sft --config config.yaml` | \
`finetune run job.yaml` |
| train on two nodes | `axolotl train config.yml --launcher torchrun -- --nnodes 2 --rdzv_endpoint ...` on each node | \
`FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 MASTER_ADDR=... llamafactory-cli train config.yaml`, and with `NODE_RANK=1` | \
`accelerate launch --num_machines 2 --machine_rank 0 ...` on each node | `kubectl apply -f job.yaml` |
| continue | `resume_from_checkpoint` | `resume_from_checkpoint` | `resume_from_checkpoint` | the same command again |
| merge | `axolotl merge-lora config.yml` | `llamafactory-cli export config.yaml` | PEFT's `merge_and_unload` | part of the run; \
`finetune merge` for others' adapters |
| prove the merge | | | | part of the run: logits of base and adapter against the merged model |
| chat | `axolotl inference config.yml` | `llamafactory-cli chat config.yaml` | | none: serve the result, as in \
[getting-started.md](../tutorial/getting-started.md) |
| serve | | `llamafactory-cli api config.yaml` | `trl vllm-serve --model MODEL`, for its online methods | none: `vllm serve`, \
as the report of the run shows it |
| a web page to set up and start runs | | `llamafactory-cli webui` | | none |
| preferences and rewards | yes | yes | yes | none: [limits.md](limits.md#when-to-use-another-tool) |
| images | yes | yes | yes | none: the text part of such models is trained |

An empty cell means that the tool's documentation names no such command.
"""


def right_column(name: str, value: Any) -> str:
    """The answer to a setting of another tool."""
    same = SAME_NAME.get(name)
    if same is not None:
        instead = answer_to(same, str(value))
        return f"spec.{same}" if instead is None else f"spec.{same}: {instead['write']}: {instead['why']}"
    equivalent = answer(name, value, WRITTEN)
    if equivalent is None:
        raise KeyError(f"no answer is known for {name}")
    return equivalent.fix.removeprefix("write ")


def page() -> str:
    """The whole page in Markdown."""
    return "\n".join([_HEAD, *(_table(tool, settings) for tool, settings in TOOLS.items())])


def _table(tool: str, settings: Mapping[str, Any]) -> str:
    rows = [f"| `{name}: {_text(value)}` | {right_column(name, value)} |" for name, value in settings.items()]
    return "\n".join([f"## {tool}\n", "| theirs | here |", "|---|---|", *rows, ""])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.stdout.write(page())
