"""A small model whose optimizer has state, and checkpoints of it that one rank writes."""

from pathlib import Path

import torch
from torch import nn

from finetune_trainer.checkpoint.manifest import Manifest, OptimizerEntry, Origin, RunState
from finetune_trainer.checkpoint.save import begin_save, commit_save
from finetune_trainer.checkpoint.state import create_state, pieces
from finetune_trainer.ranks.gang import Gang

ORIGIN = Origin(learning_sha256="p" * 64, data_hash="d" * 64)
ALONE = Gang(0, 1, 0, torch.device("cpu"), None)


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    create_state(optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].normal_()
        state["exp_avg_sq"].uniform_()
        state["step"].fill_(seed)
    return model, optimizer


def save(
    root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2, best_step: int | None = None
) -> None:
    state = RunState(eval_loss=1.5)
    writing = begin_save(
        root, step=step, ranges=pieces(model), optimizer=optimizer, gang=ALONE, origin=ORIGIN, state=state, best_step=best_step
    )
    commit_save(root, writing, ALONE, keep)


def write(root: Path, step: int, keep: int = 2, best_step: int | None = None) -> None:
    save(root, step, *model_and_optimizer(step), keep=keep, best_step=best_step)


def manifest_of(step: int, best_step: int | None = None) -> Manifest:
    optimizer = OptimizerEntry(name="AdamW", tensors=["exp_avg", "exp_avg_sq"], step=float(step))
    return Manifest(step=step, optimizer=optimizer, origin=ORIGIN, world_size=0, best_step=best_step, state=RunState(), files=[])
