"""Plans that our trainer's own build shards and trains on gloo ranks, one gang for all of them, and what came of each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import RunPlan
from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import JOB
from tests.support.small_gang import Unchanged, documents, whole
from tests.unit.finetune_job.rules.manifests import manifest

STEPS = 3


@dataclass(frozen=True)
class Trained:
    """What came of a plan."""

    error: str = ""
    """Type and message of the exception that ended it."""
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What is trained, whole and flat."""
    has_moved: bool = False
    """Whether any of it is other than at the start."""
    units: int = 0
    """FSDP units but for the root."""

    def distance(self, other: Trained) -> float:
        """Largest difference of two values of the same name."""
        assert not self.error, self.error
        assert set(self.values) == set(other.values)
        return max(float((values - other.values[name]).abs().max()) for name, values in self.values.items())


def plan_of(changes: dict[str, Any]) -> RunPlan:
    """Of the plain job with these changes, whatever rules say of it."""
    return resolve(JOB, FineTuneJobSpec.model_validate(manifest(changes)), None)


def train(plans: Mapping[str, RunPlan], base: Path, world_size: int = 2, rate: float = 1e-2) -> dict[str, Trained]:
    """Every plan on the same ranks, one after the other, on the same four documents per step."""
    results = run_ranks(_train_all, dict(plans), base, rate, world_size, world_size=world_size)
    assert not any(result.failed for result in results), results
    return {name: _joined([result.value[name] for result in results]) for name in plans}


def _joined(ranks: list[Any]) -> Trained:
    if ranks[0]["error"]:
        return Trained(error=ranks[0]["error"])
    return Trained(
        values=whole(rank["pieces"] for rank in ranks),
        has_moved=any(rank["has_moved"] for rank in ranks),
        units=ranks[0]["units"],
    )


def _train_all(rank: int, plans: dict[str, RunPlan], base: Path, rate: float, world_size: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, plan in plans.items():
        try:
            found[name] = _train(rank, plan, base, rate, world_size)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def _train(rank: int, plan: RunPlan, base: Path, rate: float, world_size: int) -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from finetune_trainer.checkpoint.state import pieces
    from finetune_trainer.model import sharded
    from finetune_trainer.ranks.gang import Gang

    trained = sharded.build(plan, base, Gang(rank, world_size, rank, torch.device("cpu"), None), Unchanged())
    model = trained.module
    first = {piece.name: piece.parameter_values().clone() for piece in pieces(model)}
    # An epsilon so large that rounding in a gradient near zero turns no update around.
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate, eps=1e-3 * rate)
    for _ in range(STEPS):
        for tokens in documents()[rank::world_size]:
            with torch.autocast("cpu", dtype=trained.autocast) if trained.autocast else nullcontext():
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
            (functional.cross_entropy(logits.float(), tokens[0, 1:], reduction="sum") * world_size / 100).backward()
        optimizer.step()
        optimizer.zero_grad()
    last = {piece.name: piece for piece in pieces(model)}
    return {
        "error": "",
        # As lists: tensors would be handed over in memory that goes with this process.
        "pieces": {name: (each.shape, each.start, each.parameter_values().tolist()) for name, each in last.items()},
        "has_moved": any(not torch.equal(last[name].parameter_values(), values) for name, values in first.items()),
        "units": sum(isinstance(each, FSDPModule | FullyShardedDataParallel) for each in model.modules()) - 1,
    }
