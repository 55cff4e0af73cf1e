"""A Llama small enough that training it takes seconds, its tokenizer, and prepared data for it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec, GpuResource
from finetune_job.plan.digest import canonical_json
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import RESHARDING_FIELD, Choice, JobIdentity, RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, VALIDATION, SplitArrays
from finetune_trainer.inspection.report import ModelReport

VOCABULARY = 264
"""256 bytes and a few special tokens."""
HIDDEN, LAYERS = 32, 2
END = "<|end|>"


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: each byte is a token, `END` ends a text and pads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END).save_pretrained(directory)


def write_tiny_llama(
    directory: Path, dtype: torch.dtype = torch.float32, tie_word_embeddings: bool = False, **settings: Any
) -> Path:
    """A random Llama with its tokenizer; the same bytes every time. `settings` replace those of LlamaConfig."""
    torch.manual_seed(7)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tie_word_embeddings,
            "eos_token_id": 256,
            "pad_token_id": 256,
            "bos_token_id": None,
            **settings,
        }
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_model_report(context: RunContext, *, reshard_after_forward: bool, batches: Sequence[Choice] = ()) -> None:
    """Write what preflight leaves on the workspace for training: its choices where the plan leaves them open."""
    report = ModelReport(
        plan_sha256=context.plan_sha256,
        model_digest="",
        model_files={},
        data_hash="",
        wrap_classes=(),
        fsdp_units=(),
        dtypes={},
        trainable={},
        saved_tensors={},
        train_sequences=1,
        supervised_tokens=1,
        total_steps=1,
        record_lengths={},
        memory={},
        resharding=Choice(field=RESHARDING_FIELD, value=reshard_after_forward, reason=""),
        batches=tuple(batches),
        warnings=(),
    )
    context.workspace.model_report.write_text(report.model_dump_json())


def prepared_split(num_sequences: int, seed: int, most_documents: int = 3) -> SplitArrays:
    """Sequences of one or more documents of 5 to 12 tokens, of which the first two are not supervised."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    supervised: list[bool] = []
    document_ends, sequence_ends, supervised_tokens = [], [], []
    for _ in range(num_sequences):
        count = 0
        for _ in range(int(random.integers(1, most_documents + 1))):
            length = int(random.integers(5, 13))
            tokens += [int(token) for token in random.integers(0, 256, length)]
            supervised += [number >= 2 for number in range(length)]
            count += length - 2
            document_ends.append(len(tokens))
        sequence_ends.append(len(document_ends))
        supervised_tokens.append(count)
    return SplitArrays(
        np.array(tokens), np.array(supervised), np.array(document_ends), np.array(sequence_ends), np.array(supervised_tokens)
    )


def write_tiny_prepared(directory: Path, num_train: int = 12, num_validation: int = 4) -> str:
    """Prepared data of random tokens; its hash."""
    splits = {TRAIN: prepared_split(num_train, 1)}
    if num_validation:
        splits[VALIDATION] = prepared_split(num_validation, 2)
    return write_prepared(directory, splits, {"pad_token_id": 256, "splits": sorted(splits)})


def tiny_spec(**changes: dict[str, Any]) -> dict[str, Any]:
    """A spec for the tiny model, with parts replaced: `tiny_spec(training={"maxSteps": 3})`."""
    spec: dict[str, Any] = {
        "model": {"source": "pvc://models/tiny"},
        "data": {
            "source": "pvc://data/train.jsonl",
            "validation": {"source": "pvc://data/validation.jsonl"},
            "format": "PromptCompletion",
            "maxSequenceLength": 64,
            "packing": True,
        },
        "method": {"type": "LoRA", "lora": {"r": 4}},
        "training": {"maxSteps": 6, "globalBatchSize": 4, "microBatchSize": 1, "learningRate": "1e-2", "seed": 3},
        "parallelism": {"processesPerNode": 2},
        "checkpoint": {"everySteps": 2},
        "output": {"destination": "pvc://results/tiny"},
        "workspace": {"claimName": "workspace"},
    }
    return {**spec, **{key: {**spec.get(key, {}), **value} for key, value in changes.items()}}


GPU_PROFILE = FineTuneProfileSpec(trainer_image="trainer", gpu=GpuResource())
"""The smallest profile that offers GPUs."""


def plan_of(spec: dict[str, Any], profile: FineTuneProfileSpec | None = None) -> RunPlan:
    """The plan of a spec; without a profile in local mode."""
    identity = JobIdentity(namespace="default", name="tiny", uid="0123456789abcdef")
    return resolve(identity, FineTuneJobSpec.model_validate(spec), profile)


def fused(plan: RunPlan) -> RunPlan:
    """Return the plan with LoRA as a profile with a GPU has it."""
    method = plan.method
    lora = method.lora.model_copy(update={"fused_forward": True}) if method.lora is not None else None
    return plan.model_copy(update={"method": method.model_copy(update={"lora": lora})})


def run_context(
    claims: Path,
    spec: dict[str, Any],
    attempt: int = 0,
    dtype: torch.dtype = torch.float32,
    profile: FineTuneProfileSpec | None = None,
) -> RunContext:
    """Claims with model, prepared data and plan.json, ready for the train role."""
    plan = plan_of(spec, profile)
    encoded = canonical_json(plan).encode()
    context = RunContext(plan, hashlib.sha256(encoded).hexdigest(), claims, attempt)
    if not context.source_model.exists():
        write_tiny_llama(context.source_model, dtype)
    context.workspace.root.mkdir(parents=True, exist_ok=True)
    (context.workspace.root / "plan.json").write_bytes(encoded)
    if not context.workspace.prepared.exists():
        write_tiny_prepared(context.workspace.prepared)
    return context
