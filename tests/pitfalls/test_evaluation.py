"""Evaluation settings without evaluations to go by, and results that a plan keeps or has whatever is written."""

from typing import Any

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.checkpoint.manifest import RunState
from finetune_trainer.train.policy import after_evaluation, is_evaluation_due, is_stopped_early
from tests.pitfalls.manifests import plans

TOTAL = 12
HELD_OUT: dict[str, Any] = {"data.validation.source": "pvc://data/held-out.jsonl"}


def run(plan: RunPlan, every_steps: int | None = None) -> tuple[int, list[int]]:
    """Steps that are done, and those after which a checkpoint competes, where the held-out loss rises from the first step on."""
    evaluation = plan.evaluation if every_steps is None else plan.evaluation.model_copy(update={"every_steps": every_steps})
    state, competing = RunState(), []
    for step in range(TOTAL + 1):
        if is_evaluation_due(step, TOTAL, evaluation):
            state, _ = after_evaluation(state, step, 1.0 + step, evaluation)
            competing += [step] if step else []
        if is_stopped_early(state, evaluation):
            return step, competing
    return TOTAL, competing


def test_one_evaluation_stops_nothing_early():
    stopping = {"evaluation.earlyStopping": {"patience": 2}}
    wrong, right = plans("early-stopping-without-evaluation", {**HELD_OUT, **stopping})
    assert run(wrong)[0] == run(right)[0] == TOTAL
    assert run(wrong, every_steps=2)[0] == 6


def test_one_evaluation_chooses_nothing():
    wrong, right = plans("best-model-is-the-last", {**HELD_OUT, "evaluation.loadBestModelAtEnd": True})
    assert run(wrong)[1] == run(right)[1] == [TOTAL]
    assert run(wrong, every_steps=4)[1] == [4, 8, TOTAL]


def test_an_adapter_that_is_the_result_is_kept_whatever_is_written():
    changes = {"merge.enabled": False, "output.adapter": False}
    assert [plan.has_adapter for plan in plans("output-adapter-is-the-result", changes)] == [True, True]


def test_full_fine_tuning_has_no_adapter_to_leave_out():
    changes = {"method.type": "Full", "output.adapter": False}
    found = plans("no-effect-output-adapter", changes)
    assert [(plan.has_adapter, plan.has_merged) for plan in found] == [(False, True)] * 2


def test_a_run_may_be_over_before_patience_is():
    changes = {"evaluation.earlyStopping": {"patience": 3}, "evaluation.everySteps": 3, "training.maxSteps": TOTAL}
    wrong, right = plans("early-stopping-after-the-end", {**HELD_OUT, **changes})
    assert run(wrong)[0] == TOTAL
    assert run(right)[0] < TOTAL
