"""Adapters trained by the trainer's own model in a gang of ranks, and by transformers and PEFT alone in one process.

Plain gradient descent, so that no difference hides behind Adam's division. One gang goes through many cases.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.model import sharded
from finetune_trainer.model.adapters import adapter_settings, attach, second_names, stored_names
from finetune_trainer.model.load import build_with_lazy_zeros
from finetune_trainer.ranks.gang import joined
from tests.support import small_gang
from tests.support.forked_ranks import run_processes
from tests.support.small_gang import Unchanged, whole
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.train.recorded_steps import RecordingDescent

STEPS, RATE, SEED = 3, 0.5, 3


@dataclass(frozen=True)
class AdapterCase:
    """One run on two ranks."""

    base: Path
    method: dict[str, Any]
    fsdp: dict[str, Any] = field(default_factory=dict)
    evaluates_first: bool = False

    def plan(self) -> Any:
        training = {"globalBatchSize": 4, "seed": SEED}
        spec = tiny_spec(training=training, parallelism={"processesPerNode": 2, "fsdp": self.fsdp}, merge={"enabled": False})
        return plan_of({**spec, "method": self.method})

    def config(self) -> LoraConfig:
        """The same adapter for PEFT alone."""
        lora = self.method["lora"]
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=lora["r"],
            lora_alpha=2 * lora["r"],
            use_dora=self.method["type"] == "DoRA",
            target_modules=lora.get("targetModules", [] if "targetParameters" in lora else "all-linear"),
            target_parameters=lora.get("targetParameters"),
            modules_to_save=lora.get("modulesToSave"),
            trainable_token_indices=lora.get("trainableTokenIndices"),
            bias=lora.get("bias", "none"),
        )


@dataclass(frozen=True)
class Trained:
    """Losses and gradients of each step, and the parameters after the last, whole and flat, by the model's own names."""

    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    shapes: dict[str, tuple[int, ...]]


def documents() -> list[torch.Tensor]:
    """Tokens of four documents, (1, length) each, among them tokens 3, 9 and 44."""
    return small_gang.documents(64, 30)


def train_in_gang(cases: dict[str, AdapterCase], directory: Path) -> dict[str, Trained]:
    """Every case, on the same two ranks one after the other."""
    store = f"file://{directory}/store"
    assert run_processes([partial(_train_cases, cases, directory, rank, store) for rank in range(2)]) == [0, 0]
    return {name: _joined([torch.load(directory / f"{name}-{rank}") for rank in range(2)]) for name in cases}


def _train_cases(cases: dict[str, AdapterCase], directory: Path, rank: int, store: str) -> None:
    with joined(rank, 2, rank, store) as gang:
        for name, case in cases.items():
            trained = sharded.build(case.plan(), case.base, gang, Unchanged())
            optimizer = RecordingDescent(trained.pieces, RATE)
            if case.evaluates_first:
                trained.module.eval()
                with torch.no_grad():
                    trained.module(input_ids=documents()[0], use_cache=False)
                trained.module.train()
            for _ in range(STEPS):
                for tokens in documents()[rank::2]:
                    with torch.autocast("cpu", dtype=trained.autocast) if trained.autocast else nullcontext():
                        loss = _loss(trained.module, tokens) * 2
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            final = {piece.name: (piece.shape, piece.start, piece.parameter_values().clone()) for piece in pieces(trained.module)}
            torch.save((optimizer.recorded, final), directory / f"{name}-{rank}")


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="sum") / 100


def _joined(ranks: Sequence[Any]) -> Trained:
    gradients = [whole([recorded[step] for recorded, _ in ranks]) for step in range(STEPS)]
    shapes = {name: shape for _, final in ranks for name, (shape, _, _) in final.items()}
    return Trained(gradients, whole([final for _, final in ranks]), shapes)


def train_plainly(base: nn.Module, case: AdapterCase) -> tuple[PeftModel, Trained]:
    """`base` with the adapter of a case, in this process: nothing of the trainer."""
    torch.manual_seed(SEED)
    model = get_peft_model(base, case.config()).train()  # type: ignore[arg-type]
    assert isinstance(model, PeftModel)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=RATE)
    gradients = []
    for _ in range(STEPS):
        for tokens in documents():
            _loss(model, tokens).backward()
        gradients.append({name: _gradient(parameter) for name, parameter in trained.items()})
        optimizer.step()
        optimizer.zero_grad()
    values = {name: parameter.detach().flatten().clone() for name, parameter in trained.items()}
    return model.eval(), Trained(gradients, values, {name: tuple(parameter.shape) for name, parameter in trained.items()})


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.flatten().clone()


def save_adapter(case: AdapterCase, trained: Trained, directory: Path) -> Path:
    """What the trainer's export writes of these parameters."""
    model = attach(build_with_lazy_zeros(case.plan(), case.base), case.plan())
    names = stored_names(model)
    directory.mkdir()
    tensors = {names[name]: values.view(trained.shapes[name]) for name, values in trained.parameters.items()}
    tensors |= {second: tensors[first].clone() for second, first in second_names(model).items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(adapter_settings(model, "base")))
    return directory


def logits_of(model: nn.Module) -> torch.Tensor:
    """For one document, in evaluation mode."""
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=documents()[0], use_cache=False).logits
    return logits


def load(base: Path) -> Any:
    """The model by transformers alone, in the element type of its files."""
    return AutoModelForCausalLM.from_pretrained(base, dtype="auto", attn_implementation="sdpa")
