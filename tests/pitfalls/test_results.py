"""Settings of evaluation and merge that show only once the training is over, in the trainer's own training and merge roles."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_job.plan.digest import canonical_json, plan_sha256
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.errors import VerificationError
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.ranks.watchdog import Heartbeat
from finetune_trainer.roles import merge as merge_role
from finetune_trainer.train.run import StopRequest, train
from tests.pitfalls.manifests import plans
from tests.pitfalls.our_ranks import plan_of
from tests.support.tiny_model import write_tiny_llama, write_tiny_prepared

STEPS = 3
SHORT: dict[str, Any] = {"training.maxSteps": STEPS, "training.globalBatchSize": 4, "training.scheduler": "Constant"}
HELD_OUT = {"data.validation.source": "pvc://data/held-out.jsonl"}
EVALUATED = {"evaluation.everySteps": 1}
BEST = {"evaluation.loadBestModelAtEnd": True}


def trained(plan: RunPlan, claims: Path) -> tuple[RunContext, dict[str, str]]:
    """The plan trained in this process, and the facts of its report."""
    context = RunContext(plan, plan_sha256(plan), claims, 0)
    write_tiny_llama(context.base_model)
    context.workspace.root.mkdir(parents=True)
    (context.workspace.root / "plan.json").write_text(canonical_json(plan))
    write_tiny_prepared(context.workspace.prepared, num_validation=4 if plan.data.validation else 0)
    return context, train(context, Gang(0, 1, 0, torch.device("cpu"), None), StopRequest(), 0, Heartbeat())


def evaluated_after(context: RunContext) -> list[int]:
    """Steps after which the held-out records were evaluated."""
    lines = [json.loads(line) for line in context.workspace.history.read_text().splitlines()]
    return [line["step"] for line in lines if "eval_loss" in line]


def test_without_held_out_records_nothing_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`evaluation-without-validation`, and the last checkpoint is the best for `best-model-without-validation`."""
    losses = iter([4.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("finetune_trainer.train.run.held_out_loss", lambda *_, **__: next(losses))
    asked = {**SHORT, **EVALUATED}
    wrong = plans("best-model-without-validation", {**asked, **BEST})[0]
    same = plans("evaluation-without-validation", {**asked, **BEST})[0]
    assert same == wrong
    context, facts = trained(wrong, tmp_path / "wrong")
    assert evaluated_after(context) == []
    assert facts["exported_step"] == str(STEPS)
    context, facts = trained(plan_of({**asked, **BEST, **HELD_OUT}), tmp_path / "right")
    assert evaluated_after(context) == list(range(STEPS + 1))
    assert facts["exported_step"] == "1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    return trained(plan_of(SHORT), tmp_path_factory.mktemp("claims"))[0]


def merged(finished: RunContext, plan: RunPlan, output: str) -> dict[str, str]:
    """The facts of a merge with this plan's settings."""
    other = finished.plan.model_copy(
        update={"merge": plan.merge, "output": finished.plan.output.model_copy(update={"path": output})}
    )
    return merge_role.merge(replace(finished, plan=other)).facts


def test_no_merged_model_agrees_more_than_always(finished: RunContext):
    wrong, right = plans("verification-agreement-range", {"merge.verify.minTop1Agreement": "2"})
    with pytest.raises(VerificationError, match=r"agrees at 100\.00%; the minimum is 200\.00%"):
        merged(finished, wrong, "agreement-wrong")
    assert merged(finished, right, "agreement-right")["top1"] == "1"


@pytest.mark.parametrize("allowed", ["0", "1e-17"])
def test_a_rounded_merge_diverges(finished: RunContext, allowed: str):
    # In float32 the divergence of so small a model is below the rounding of its own computation on some processors.
    settings = {"merge.verify.maxKlDivergence": allowed, "merge.dtype": "bfloat16"}
    wrong, right = plans("verification-divergence-zero", settings)
    with pytest.raises(VerificationError, match=rf"mean KL divergence of 90% of positions is .*; the limit is {allowed}"):
        merged(finished, wrong, f"divergence-{allowed}-wrong")
    assert merged(finished, right, f"divergence-{allowed}-right")["top1"] == "1"


@pytest.mark.parametrize(
    "changes",
    [
        {"training.learningRate": "1e-30"},
        {"training.maxGradNorm": "1e-18"},
        {"training.optimizer": "SGD", "training.maxGradNorm": "1e-15"},
        {"training.adamEpsilon": "1e15"},
    ],
)
def test_steps_too_small_to_be_seen(changes: dict[str, str], tmp_path: Path):
    wrong, right = plans("training-moves-nothing", {**SHORT, **changes})
    context, _ = trained(wrong, tmp_path / "wrong")
    with pytest.raises(VerificationError, match="the merged model has the base model's weights in every tensor"):
        merged(context, wrong, "result")
    context, _ = trained(right, tmp_path / "right")
    assert merged(context, right, "result")["top1"] == "1"


def test_nothing_was_packed_that_could_be_unpacked(finished: RunContext):
    wrong, right = plans("merge-dequantized-without-qlora", {"merge.base": "Dequantized"})
    with pytest.raises(ValueError, match="nothing was packed in training"):
        merged(finished, wrong, "base-wrong")
    assert merged(finished, right, "base-right")["top1"] == "1"
