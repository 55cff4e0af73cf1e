"""Settings under the names of other tools (transformers, PEFT, accelerate, TRL, axolotl, LLaMA-Factory), and what to set here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_cli.corrections.counts import (
    EPOCHS,
    MICRO_BATCH,
    MOST_COUNTED,
    NODES,
    PROCESSES,
    STEPS,
    TOTALS,
    count,
    counts_of,
    values_of,
)
from finetune_cli.corrections.words import ATTENTIONS, DTYPES, NO_PREFERENCES, OPTIMIZERS, PRECISIONS, SCHEDULERS
from finetune_cli.corrections.wrong_field import letters
from finetune_job.api.inputs import LossOn
from finetune_job.api.method import MethodType
from finetune_job.api.training import Precision
from finetune_job.rules.rule import yaml_text

Spec = Mapping[str, Any]


@dataclass(frozen=True)
class Equivalent:
    """What a setting of another tool is here."""

    fix: str
    """What to do, in words."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """New values by path under `spec`; the foreign setting itself is removed in any case."""
    is_certain: bool = False
    """Whether it means the same here, so that a program may make the change unasked."""


_Translate = Callable[[Any, Spec], Equivalent]
_USUAL_STEPS = 100
"""Between two checkpoints or evaluations, if it is not known how many there are."""


def answer(name: str, value: Any, spec: Spec) -> Equivalent | None:
    """What to write instead of a setting `name`; None if no other tool is known to have it. spec: all that is written."""
    translate = _BY_NAME.get(letters(name))
    return None if translate is None else translate(value, spec)


def first_name(name: str) -> str | None:
    """The commonest of the names that a setting has; None if no other tool is known to have it."""
    return next((names[0] for names, translate in _ROWS if translate is _BY_NAME.get(letters(name))), None)


def _same(path: str) -> _Translate:
    """Another name for one of our fields."""
    return lambda value, _spec: Equivalent(f"write spec.{path}", {path: value}, is_certain=True)


def _words(path: str, words: Mapping[str, str], usual: str) -> _Translate:
    """Another name, and other words for its values. usual: what to propose for a word that is not known."""

    def translate(value: Any, _spec: Spec) -> Equivalent:
        known = words.get(letters(str(value)))
        return Equivalent(f"write spec.{path}: {known or usual}", {path: known or usual}, is_certain=known is not None)

    return translate


def _not_here(reason: str) -> _Translate:
    """A setting that has nothing to set in its place."""
    return lambda _value, _spec: Equivalent(f"remove it: {reason}")


def _switch(
    path: str, on: Any, off: Any = None, *, unset: str = "that is so if nothing is set", is_off_certain: bool = True
) -> _Translate:
    """A switch that is a value of one of our fields. unset: why nothing is to write if it is off, unless there is an `off`."""

    def translate(value: Any, _spec: Spec) -> Equivalent:
        if _is_off(value) and off is None:
            return Equivalent(f"remove it: {unset}", is_certain=True)
        if _is_off(value):
            return Equivalent(f"write spec.{path}: {yaml_text(off)}", {path: off}, is_certain=is_off_certain)
        shown = f"[{', '.join(on)}]" if isinstance(on, list) else yaml_text(on)
        return Equivalent(f"write spec.{path}: {shown}", {path: on}, is_certain=value is True or str(value).lower() == "true")

    return translate


def _is_off(value: Any) -> bool:
    return value is False or str(value).strip().lower() in ("false", "no", "none", "null", "off", "0", "")


def _accumulation(value: Any, spec: Spec) -> Equivalent:
    micros, nodes, processes = (counts_of(spec, names) for names in (MICRO_BATCH, NODES, PROCESSES))
    micro, steps = next(filter(None, micros), None), count(value)
    ranks = math.prod(next(filter(None, counts), 1) for counts in (nodes, processes))
    total = (micro or 1) * ranks * (steps or 1)
    is_clear = all(len({*counts}) < 2 and None not in counts for counts in (micros, nodes, processes, [steps]))
    is_told_otherwise = any(True for _ in values_of(spec, TOTALS))
    return Equivalent(
        f"write spec.training.globalBatchSize: {total} (microBatchSize {micro or 'unset, taken as 1'} x {ranks} "
        f"rank{'s' if ranks > 1 else ''} x {steps or 1} accumulated): accumulation follows from it",
        {"training.globalBatchSize": min(total, MOST_COUNTED)},
        is_certain=micro is not None and is_clear and not is_told_otherwise and total <= MOST_COUNTED,
    )


def _share(value: Any) -> float | None:
    """A number between 0 and 1, by which transformers means a part of all steps."""
    try:
        found = float(value) if isinstance(value, float | str) else 0.0
    except ValueError:
        return None
    return found if 0 < found < 1 else None


def _part(spec: Spec, name: str) -> Mapping[str, Any]:
    part = spec.get(name)
    return part if isinstance(part, Mapping) else {}


def _trackers(value: Any, _spec: Spec) -> Equivalent:
    names = [str(one) for one in value] if isinstance(value, list) else [] if _is_off(value) else [str(value)]
    names = [name for name in names if name.lower() not in ("none", "all")]
    if not names:
        return Equivalent("remove it: nothing is reported to a tracker unless spec.training.trackers names one", is_certain=True)
    return Equivalent(f"write spec.training.trackers: [{', '.join(names)}]", {"training.trackers": names}, is_certain=True)


def _added_tokens(*, special: bool) -> _Translate:
    """A list of them, or a text in which commas are between them."""
    more = ", each with special: true" if special else ""
    fix = f"name them as content in spec.model.addedTokens{more}: their rows are trained"

    def translate(value: Any, _spec: Spec) -> Equivalent:
        given = value if isinstance(value, list) else [] if _is_off(value) else str(value).split(",")
        names = [str(one).strip() for one in given if str(one).strip()]
        tokens = [{"content": name, **({"special": True} if special else {})} for name in names]
        return Equivalent(fix, {"model.addedTokens": tokens} if tokens else {}, is_certain=True)

    return translate


def _warmup_steps(value: Any, spec: Spec) -> Equivalent:
    total, steps, share = _total_steps(spec), count(value), _share(value)
    if share is not None or _is_off(value):
        written = f"{share or 0:g}"
        return Equivalent(f'write spec.training.warmupRatio: "{written}"', {"training.warmupRatio": written}, is_certain=True)
    written = f"{min(steps / total, 0.99):.3g}" if total and steps else "0.03"
    return Equivalent(
        f'write spec.training.warmupRatio: "{written}", a share of all steps', {"training.warmupRatio": written}, is_certain=False
    )


def _every(path: str) -> _Translate:
    """Another name for one of our numbers of steps, which transformers also takes as a share of all of them."""

    def translate(value: Any, spec: Spec) -> Equivalent:
        share, total = _share(value), _total_steps(spec)
        if share is None:
            return _same(path)(value, spec)
        steps = max(round(share * total), 1) if total else _USUAL_STEPS
        return Equivalent(f"write spec.{path}: {steps}, a number of steps and no share of them", {path: steps})

    return translate


def _total_steps(spec: Spec) -> int | None:
    return count(_part(spec, "training").get("maxSteps"))


def _half(value: Any, _spec: Spec) -> Equivalent:
    if _is_off(value):
        return Equivalent("remove it: float16 is never computed with", is_certain=True)
    return Equivalent(
        "write spec.training.precision: bf16, which needs no loss scaling; float16 is not offered",
        {"training.precision": Precision.BF16.value},
    )


def _in_quarters(value: Any, _spec: Spec) -> Equivalent:
    if _is_off(value):
        return Equivalent("remove it: only QLoRA and QDoRA pack the base", is_certain=True)
    return Equivalent(
        "write spec.method.type: QLoRA, which packs the base in 4 bits", {"method.type": MethodType.QLORA.value}, True
    )


def _in_eighths(value: Any, _spec: Spec) -> Equivalent:
    if _is_off(value):
        return Equivalent("remove it: only QLoRA and QDoRA pack the base", is_certain=True)
    changes = {"method.type": MethodType.QLORA.value, "method.quantization.bits": 8}
    return Equivalent("write spec.method.type: QLoRA and spec.method.quantization.bits: 8 (on one rank)", changes)


def _targets(value: Any, _spec: Spec) -> Equivalent:
    path = "method.lora.targetModules"
    if str(value).strip().lower() in ("all", "all-linear"):
        return Equivalent(f"write spec.{path}: [all-linear]", {path: ["all-linear"]}, is_certain=True)
    return Equivalent(f"write spec.{path}", {path: value}, is_certain=True)


def _profile(what: str) -> _Translate:
    return _not_here(f"{what} are the FineTuneProfile's, which spec.profile names")


_ROWS: tuple[tuple[tuple[str, ...], _Translate], ...] = (
    (("lr", "learning_rate"), _same("training.learningRate")),
    (MICRO_BATCH, _same("training.microBatchSize")),
    (("gradient_accumulation_steps", "gradient_accumulation", "accumulation_steps", "grad_accum"), _accumulation),
    (("batch_size", "train_batch_size", "total_batch_size"), lambda value, _spec: Equivalent(
        "write spec.training.globalBatchSize for the sequences of a step over all ranks, or spec.training.microBatchSize for "
        "those of one rank at a time", {"training.globalBatchSize": value})),
    (EPOCHS, _same("training.epochs")),
    (STEPS, _same("training.maxSteps")),
    (("lr_scheduler_type", "lr_scheduler", "scheduler_type"), _words("training.scheduler", SCHEDULERS, "Cosine")),
    (("optim", "optimizer_name"), _words("training.optimizer", OPTIMIZERS, "AdamW")),
    (("warmup_steps", "num_warmup_steps"), _warmup_steps),
    (("gradient_clipping", "max_gradient_norm", "clip_grad_norm", "grad_clip"), _same("training.maxGradNorm")),
    (("gradient_checkpointing", "use_gradient_checkpointing"), _switch("training.activationCheckpointing", "Full", "None")),
    # Off, float16 may be meant.
    (("bf16", "use_bf16"), _switch("training.precision", Precision.BF16.value, Precision.FP32.value, is_off_certain=False)),
    (("fp16", "use_fp16"), _half),
    (("mixed_precision",), _words("training.precision", PRECISIONS, Precision.BF16.value)),
    (("tf32", "allow_tf32"), _not_here("spec.training.precision alone says how is computed")),
    (("torch_compile", "use_compile"), _switch("training.compile", True, False)),
    (("report_to", "loggers", "logger", "log_with"), _trackers),
    (("use_wandb", "wandb", "wandb_project"), lambda value, spec: _trackers([] if _is_off(value) else "wandb", spec)),
    (("logging_steps", "logging_strategy", "logging_first_step"), _not_here("every step is logged")),
    (("save_steps", "checkpoint_steps"), _every("checkpoint.everySteps")),
    (("save_total_limit", "keep_checkpoints"), _same("checkpoint.keep")),
    (("save_strategy", "saves_per_epoch"), _not_here("spec.checkpoint.everySteps says how often is saved")),
    (("eval_steps", "evaluation_steps"), _every("evaluation.everySteps")),
    (("eval_strategy", "evaluation_strategy", "do_eval", "evals_per_epoch"), _not_here(
        "spec.evaluation.everySteps says how often is evaluated")),
    (("per_device_eval_batch_size", "eval_batch_size"), _not_here("evaluation takes spec.training.microBatchSize")),
    (("resume_from_checkpoint", "resume"), _not_here("a run continues from its newest checkpoint by itself")),
    (("data_seed", "random_seed", "random_state"), _same("training.seed")),
    (("deepspeed", "deepspeed_config", "zero_stage"), _not_here(
        "FSDP shards parameters, gradients and optimizer state here, as ZeRO 3 does; spec.parallelism.fsdp has its settings")),
    (("neftune_noise_alpha", "label_smoothing_factor"), _not_here("no noise is added to embeddings or labels here")),
    (("group_by_length", "dataloader_num_workers", "dataloader_pin_memory", "dataset_num_proc", "preprocessing_num_workers",
      "dataset_prepared_path", "overwrite_cache", "pad_to_sequence_len"), _not_here(
        "records are tokenised and packed once, before training")),
    (("train_on_inputs", "train_on_prompt"), _switch("data.lossOn", LossOn.ALL.value)),
    # Off, it depends on the form of the records.
    (("assistant_only_loss",), _switch("data.lossOn", LossOn.ASSISTANT.value, LossOn.ALL.value, is_off_certain=False)),
    (("completion_only_loss",), _switch("data.lossOn", LossOn.COMPLETION.value, LossOn.ALL.value, is_off_certain=False)),
    (("dataset_text_field",), _same("data.mapping.text")),
    (("template",), lambda _value, _spec: Equivalent(
        "remove it: the tokenizer's template is used; spec.data.chatTemplate names another, such as ChatML or Llama3")),
    (("max_samples",), _not_here("all records are trained on; spec.data.datasets has a weight for each source")),
    (("overwrite_output_dir",), _not_here("results are never overwritten; name a new path in spec.output.destination")),
    (("plot_loss",), _not_here("the losses of every step are in history.jsonl on the workspace")),
    (("use_liger_kernel", "enable_liger_kernel"), _not_here(
        "the loss is computed a part at a time here, so that the logits of a batch never exist")),
    (("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"), _not_here(
        "ranks share weights by FSDP alone, and each sequence is on one rank; shorten spec.data.maxSequenceLength")),
    (("rl", "stage", "loss_type", "beta"), _not_here(NO_PREFERENCES)),
    (("val_set_size", "val_size", "validation_split", "eval_dataset"), _not_here(
        "name held-out records in spec.data.validation.source; nothing is split off")),
    (("lora_r", "lora_rank", "rank", "lora_dim"), _same("method.lora.r")),
    (("alpha",), _same("method.lora.loraAlpha")),
    (("dropout",), _same("method.lora.loraDropout")),
    (("lora_target_modules", "lora_target", "target"), _targets),
    (("lora_target_linear",), _switch("method.lora.targetModules", ["all-linear"], unset="targetModules names the layers")),
    (("lora_modules_to_save", "additional_target"), _same("method.lora.modulesToSave")),
    (("add_tokens", "tokens", "new_tokens"), _added_tokens(special=False)),
    (("add_special_tokens", "additional_special_tokens"), _added_tokens(special=True)),
    (("resize_vocab", "resize_token_embeddings_to_32x", "resize_token_embeddings"), _not_here(
        "spec.model.addedTokens gives the embeddings a row for each token that it names")),
    (("lora_model_dir", "adapter_name_or_path", "adapter_model"), _not_here(
        "an adapter is not trained further; merge it with `finetune merge` and name the merged model in spec.model.source")),
    (("use_dora",), _switch("method.type", "DoRA")),
    (("load_in_4bit", "use_4bit"), _in_quarters),
    (("load_in_8bit", "use_8bit"), _in_eighths),
    (("quantization_bit",), lambda value, spec: (_in_eighths if value == 8 else _in_quarters)(value, spec)),
    (("bnb_4bit_quant_type", "quantization_type"), _same("method.quantization.quantType")),
    (("bnb_4bit_use_double_quant", "double_quantization"), _same("method.quantization.doubleQuant")),
    (("bnb_4bit_compute_dtype",), _words("method.quantization.computeDtype", DTYPES, "bfloat16")),
    (("adapter", "finetuning_type", "peft_type", "peft_method"), _same("method.type")),
    (("model_name_or_path", "base_model", "model_id", "model_name", "pretrained_model_name_or_path", "hf_model"),
     _same("model.source")),
    (("torch_dtype", "dtype"), _words("model.dtype", DTYPES, "bfloat16")),
    (("attn_implementation", "attention_implementation", "flash_attn", "use_flash_attention_2", "flash_attention"),
     lambda value, _spec: Equivalent(
         f"write spec.model.attention: {ATTENTIONS.get(str(value), 'varlen')}; left out, preflight chooses torch's own flash "
         "kernels on a GPU if the model allows them",
         {"model.attention": ATTENTIONS.get(str(value), "varlen")}, is_certain=str(value) in ATTENTIONS)),
    (("trust_remote_code",), _same("model.allowRemoteCode")),
    (("train_file", "dataset", "dataset_name", "dataset_path", "train_data", "data_path"), _same("data.source")),
    (("max_seq_length", "max_length", "sequence_len", "sequence_length", "seq_len", "cutoff_len", "context_length",
      "model_max_length", "max_seq_len"), _same("data.maxSequenceLength")),
    (("sample_packing", "pack_sequences"), _same("data.packing")),
    (("output_dir", "output_path"), _same("output.destination")),
    (("push_to_hub",), _not_here("an hf:// address in spec.output.destination publishes to the Hub")),
    (("hub_model_id", "push_to_hub_model_id"), _same("output.destination")),
    (PROCESSES, _same("parallelism.processesPerNode")),
    (NODES, _same("parallelism.nodes")),
    (("fsdp_auto_wrap_policy",), _same("parallelism.fsdp.autoWrapPolicy")),
    (("fsdp_transformer_layer_cls_to_wrap",), _same("parallelism.fsdp.transformerLayerClsToWrap")),
    (("fsdp_offload_params", "cpu_offload"), _same("parallelism.fsdp.offloadParams")),
    (("fsdp_state_dict_type",), _same("parallelism.fsdp.stateDictType")),
    (("fsdp_sharding_strategy", "sharding_strategy"), _not_here(
        "FULL_SHARD is what is done; spec.parallelism.fsdp.reshardAfterForward: false is SHARD_GRAD_OP")),
    (("fsdp_version",), _same("parallelism.fsdp.version")),
    (("image", "trainer_image", "resources", "node_selector", "tolerations", "affinity", "gpu", "service_account_name"),
     _profile("images, resources and placement")),
)  # fmt: skip
_BY_NAME: dict[str, _Translate] = {letters(name): translate for names, translate in _ROWS for name in names}
