"""Chats against TRL's SFTTrainer: the tokens and masks that it makes of them, and the losses and gradients of its steps.

TRL tokenises the chats itself, with `assistant_only_loss` and the same template, and trains without packing, one padded batch
after the other. Ours trains the packed documents that hold the same tokens. Both then take three steps of plain gradient descent
in float32; the bounds are those of rounding in another order of sums.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from finetune_trainer.data.packing import pack
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, SplitArrays
from finetune_trainer.train.batches import global_batch
from tests.support.tiny_model import END, run_context, tiny_spec
from tests.unit.finetune_trainer.train.recorded_steps import distance, recorded_steps

STEPS, RATE, SEED, GLOBAL_BATCH, LENGTH = 3, 0.5, 3, 4, 96
LOSS_BOUND, GRADIENT_BOUND = 1e-6, 2e-6
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '" + END + "' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
)
CHATS = [
    [
        turn
        for number in range(1 + chat % 2)
        for turn in (
            {"role": "user", "content": f"{chat} plus {number}?"},
            {"role": "assistant", "content": f"It is {chat + number}{'!' * (chat % 5)}"},
        )
    ]
    for chat in range(24)
]


def prepared(directory: Path, tokenizer: Any) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Write the chats as prepared data; ids and labels of each document, and the documents of each sequence."""
    ids, labels = [], []
    for chat in CHATS:
        found = tokenizer.apply_chat_template(
            chat, chat_template=TEMPLATE, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids.append(found["input_ids"])
        labels.append([t if flag else -100 for t, flag in zip(found["input_ids"], found["assistant_masks"], strict=True)])
    packed, ends = pack([len(each) for each in ids], LENGTH)
    sequences = [part.tolist() for part in np.split(packed, ends[:-1])]
    order = [document for sequence in sequences for document in sequence]
    supervised = [np.array(labels[document]) != -100 for document in order]
    arrays = SplitArrays(
        tokens=np.concatenate([ids[document] for document in order]),
        supervised=np.concatenate(supervised),
        document_ends=np.cumsum([len(ids[document]) for document in order]),
        sequence_ends=np.cumsum([len(sequence) for sequence in sequences]),
        supervised_tokens=np.array([sum(label != -100 for d in sequence for label in labels[d]) for sequence in sequences]),
    )
    write_prepared(directory, {TRAIN: arrays}, {"pad_token_id": tokenizer.pad_token_id, "splits": [TRAIN]})
    return ids, labels, sequences


class Kept(TrainerCallback):
    """Gradients before each step of the optimizer."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.gradients.append({name: parameter.grad.flatten().clone() for name, parameter in trained.items()})

    def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


class InOrder(SFTTrainer):
    """Keeps what it is fed; the order of the records is that of the data set."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        self.fed = [*getattr(self, "fed", []), {name: inputs[name].clone() for name in ("input_ids", "labels")}]
        loss = super().compute_loss(model, inputs, *arguments, **named)
        self.precise = [*getattr(self, "precise", []), float(loss.detach())]
        return loss


@pytest.mark.parametrize("method", ["LoRA", "Full"])
def test_chats_train_as_in_trl(tmp_path: Path, method: str) -> None:
    adapter = {"r": 4} if method == "LoRA" else None
    spec = tiny_spec(
        method={"type": method, "lora": adapter},
        data={"maxSequenceLength": LENGTH},
        training={"maxSteps": STEPS, "globalBatchSize": GLOBAL_BATCH, "microBatchSize": 1, "seed": SEED, "maxGradNorm": "0"},
    )
    context = run_context(tmp_path, spec)
    tokenizer = AutoTokenizer.from_pretrained(context.base_model)
    ids, labels, sequences = prepared(context.workspace.prepared, tokenizer)
    # A document of one sequence is a record of TRL's: its global batch has as many records as ours has documents.
    steps = [[d for s in global_batch(step, GLOBAL_BATCH, SEED, len(sequences)) for d in sequences[s]] for step in range(STEPS)]
    ours = recorded_steps(context, tmp_path, STEPS, RATE)

    model: Any = AutoModelForCausalLM.from_pretrained(context.base_model, dtype=torch.float32, attn_implementation="sdpa")
    if adapter is not None:
        torch.manual_seed(SEED)
    peft_config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear") if adapter else None
    fed, losses, gradients = [], [], []
    for step, documents in enumerate(steps):
        kept = Kept()
        trainer = InOrder(
            model=model,
            args=SFTConfig(
                output_dir=str(tmp_path / "trl"), per_device_train_batch_size=1, gradient_accumulation_steps=len(documents),
                max_steps=1, learning_rate=RATE, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, weight_decay=0.0,
                max_length=LENGTH, packing=False, assistant_only_loss=True, use_cpu=True, bf16=False, seed=SEED,
                gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"messages": CHATS[document]} for document in documents]),
            processing_class=with_template(tokenizer),
            peft_config=peft_config if step == 0 else None,
            callbacks=[kept],
        )  # fmt: skip
        trainer.train()
        # The next step continues with the same model, and new records.
        model = trainer.model
        fed.append(trainer.fed)
        losses.append(sum(trainer.precise))
        gradients += kept.gradients

    for documents, batches in zip(steps, fed, strict=True):
        found = sorted((batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches)
        assert found == sorted((ids[document], labels[document]) for document in documents), "tokens and masks are the same"
    for (loss, found_gradients), trl_loss, trl_gradients in zip(ours, losses, gradients, strict=True):
        assert loss == pytest.approx(trl_loss, rel=LOSS_BOUND)
        assert set(found_gradients) == set(trl_gradients)
        for name, gradient in trl_gradients.items():
            assert distance(found_gradients[name], gradient) <= GRADIENT_BOUND, name


def with_template(tokenizer: Any) -> Any:
    tokenizer.chat_template = TEMPLATE
    return tokenizer
