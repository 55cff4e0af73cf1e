"""Reentrant checkpoints lose the gradients of layers whose inputs need none, and DDP's order of gradients."""

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from finetune_job.plan.run_plan import RunPlan, TrainingPlan
from finetune_trainer.model.sharded import build
from finetune_trainer.ranks.gang import Gang
from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import trains
from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import plans
from tests.support.small_gang import Unchanged
from tests.support.tiny_model import write_tiny_llama


def gradients(use_reentrant: bool, inputs_need_gradients: bool = False) -> torch.Tensor | None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    inputs = torch.randn(2, 4, requires_grad=inputs_need_gradients)
    checkpoint(layer, inputs, use_reentrant=use_reentrant).sum().backward()
    return layer.weight.grad


def test_reentrant_checkpoints_need_inputs_with_gradients():
    with (
        pytest.warns(UserWarning, match="None of the inputs have requires_grad"),
        pytest.raises(RuntimeError, match="does not require grad"),
    ):
        gradients(use_reentrant=True)
    expected = gradients(use_reentrant=False)
    assert expected is not None
    assert torch.equal(expected, gradients(use_reentrant=True, inputs_need_gradients=True))


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_transformers_own_checkpoints_train(version, kind):
    """It asks for gradients of the embeddings' output itself, where it knows of an adapter."""
    trains(Case(version=version, checkpointing=kind))


def distributed_step(rank: int, use_reentrant: bool, find_unused_parameters: bool) -> None:
    torch.manual_seed(0)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                inputs = checkpoint(self.layer, inputs, use_reentrant=use_reentrant)
            return inputs

    model = torch.nn.parallel.DistributedDataParallel(Twice(), find_unused_parameters=find_unused_parameters)
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_ddp_counts_reentrant_gradients_twice():
    errors = [result.error for result in run_ranks(distributed_step, True, True) if result.failed]
    assert errors
    assert "Expected to mark a variable ready only once" in errors[0]
    assert not any(result.failed for result in run_ranks(distributed_step, False, False))


def kept_bytes(plan: RunPlan, base: Path) -> int:
    """What the forward pass of our trainer's model keeps for the backward pass outside of checkpoints, parameters left out."""
    model = build(plan, base, Gang(0, 1, 0, torch.device("cpu"), None), Unchanged()).module
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(input_ids=torch.arange(60).view(2, 30), use_cache=False).logits
    assert hidden.requires_grad
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for place, size in kept.items() if place not in held)


def test_selective_recomputation_keeps_all_of_a_compiled_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`compile-with-selective-checkpointing`. The backend makes no difference, and this one needs no C++ compiler."""
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: original(layer, backend="aot_eager"))
    base = write_tiny_llama(tmp_path, num_hidden_layers=1)
    selective = {"training.compile": True, "training.activationCheckpointing": "Selective"}
    wrong, right = plans("compile-with-selective-checkpointing", selective)
    compiled = [kept_bytes(wrong, base), kept_bytes(right, base)]
    alone = [kept_bytes(plan.model_copy(update={"training": uncompiled(plan)}), base) for plan in (wrong, right)]
    assert compiled[0] > 2 * max(compiled[1], *alone), "what none of the others keeps is kept"


def uncompiled(plan: RunPlan) -> TrainingPlan:
    return plan.training.model_copy(update={"compile": False})
