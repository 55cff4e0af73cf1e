"""Length, batches and learning rates: shares beyond their range in transformers' schedules and in the trainer's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from transformers.optimization import get_scheduler, get_wsd_schedule

from finetune_job.plan.run_plan import TrainingPlan
from finetune_trainer.data.steps import total_steps
from finetune_trainer.train.batches import global_batch, micro_batch
from finetune_trainer.train.policy import learning_rate
from tests.pitfalls.manifests import plans, settled

STEPS = 20
PEAK = 1e-3


def rates(training: TrainingPlan) -> list[float]:
    """Of each step of the trainer, as multiples of the peak."""
    return [learning_rate(step, STEPS, training) / training.learning_rate for step in range(STEPS)]


def theirs(schedule: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    """Of each step of a schedule of transformers, as multiples of the peak."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
    scheduler = schedule(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0] / PEAK)
        optimizer.step()
        scheduler.step()
    return found


def test_a_run_that_only_warms_up():
    """transformers' rate never reaches its peak; this trainer's does at the end, and never falls."""
    wrong, right = plans("warmup-ratio-range", {"training.warmupRatio": "1"})
    reached = theirs(lambda optimizer: get_scheduler("cosine", optimizer, STEPS, STEPS))
    assert max(reached) == pytest.approx(1 - 1 / STEPS)
    assert rates(wrong.training) == sorted(rates(wrong.training))
    reached = theirs(lambda optimizer: get_scheduler("cosine", optimizer, 1, STEPS))
    assert max(reached) == pytest.approx(1)
    assert rates(right.training)[0] == pytest.approx(1)
    assert rates(right.training)[-1] < 0.1


def test_a_decay_longer_than_the_run():
    """transformers starts far below the peak; this trainer decays over all steps, as with 1."""
    scheduler = {"training.scheduler": "WarmupStableDecay", "training.warmupRatio": "0.1"}
    wrong, right = plans("decay-ratio-range", {**scheduler, "training.decayRatio": "1.5"})
    schedule = partial(get_wsd_schedule, num_warmup_steps=2, num_training_steps=STEPS, decay_type="linear")
    assert max(theirs(partial(schedule, num_decay_steps=30))) == pytest.approx(0.6)
    assert rates(wrong.training).count(1.0) <= 2
    assert max(theirs(partial(schedule, num_decay_steps=4))) == pytest.approx(1)
    assert rates(right.training).count(1.0) > 10


def test_a_warmup_and_a_decay_longer_than_the_run():
    """transformers' rate drops after the warm-up, where its decay has begun already; ours begins then."""
    written = {"training.warmupRatio": "0.5", "training.decayRatio": "0.8"}
    wrong, right = plans("decay-within-warmup", {"training.scheduler": "WarmupStableDecay", **written})
    schedule = partial(get_wsd_schedule, num_warmup_steps=10, num_training_steps=STEPS, decay_type="linear")
    assert max(theirs(partial(schedule, num_decay_steps=16))) == pytest.approx(0.9)
    assert max(theirs(partial(schedule, num_decay_steps=10))) == pytest.approx(1)
    assert (wrong.training.decay_ratio, right.training.decay_ratio) == (0.8, 0.5)
    assert rates(wrong.training) == rates(right.training)


def test_a_least_rate_above_the_peak():
    wrong, right = plans("min-learning-rate-ratio-range", {"training.minLearningRateRatio": "2", "training.warmupRatio": "0.1"})
    for ratio, training, most in ((2.0, wrong.training, 2.0), (0.0, right.training, 1.0)):
        settings = {"min_lr_rate": ratio}
        schedule = partial(get_scheduler, "cosine_with_min_lr", scheduler_specific_kwargs=settings)
        assert max(theirs(partial(schedule, num_warmup_steps=2, num_training_steps=STEPS))) == pytest.approx(most, rel=0.02)
        assert max(rates(training)) == pytest.approx(most, rel=0.02)


@pytest.mark.parametrize(
    ("rule", "setting", "deaf", "listening"),
    [
        ("no-effect-decay-ratio", "decayRatio", "Cosine", "WarmupStableDecay"),
        ("no-effect-min-learning-rate-ratio", "minLearningRateRatio", "Constant", "Cosine"),
    ],
)
def test_settings_that_a_schedule_does_not_look_at(rule: str, setting: str, deaf: str, listening: str):
    written = {f"training.{setting}": "0.5"}
    wrong, right = plans(rule, {"training.scheduler": deaf, **written})
    assert settled(wrong) != settled(right)
    assert rates(wrong.training) == rates(right.training)
    heard = {"scheduler": listening}
    assert rates(wrong.training.model_copy(update=heard)) != rates(right.training.model_copy(update=heard))


def test_nothing_changes_at_a_rate_of_0():
    wrong, right = plans("learning-rate-zero", {"training.learningRate": "0"})
    for plan, moves in ((wrong, False), (right, True)):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([weight], lr=plan.training.learning_rate, weight_decay=0.1)
        for _ in range(3):
            weight.grad = torch.ones(4)
            optimizer.step()
        assert bool((weight != 1).any()) is moves


def test_one_of_two_lengths_is_ignored(tmp_path: Any):
    """Both in transformers and here maxSteps wins without a word."""
    rule = "epochs-or-max-steps"
    wrong, right = plans(rule, {"training.epochs": 3, "training.maxSteps": 5})
    arguments = TrainingArguments(output_dir=str(tmp_path), num_train_epochs=3, max_steps=5, use_cpu=True)
    assert (arguments.max_steps, arguments.num_train_epochs) == (5, 3)
    assert [num_steps(plan.training) for plan in (wrong, right)] == [5, 5]
    assert right.training.epochs is None
    neither, one_pass = plans(rule, {"training.maxSteps": None})
    assert num_steps(neither.training) == 0, "a run without a length trains nothing"
    assert num_steps(one_pass.training) == 25


def num_steps(training: TrainingPlan) -> int:
    return total_steps(training.epochs, training.max_steps, 100, 4)


@pytest.mark.parametrize("micro", [{}, {"training.microBatchSize": 2}])
def test_a_batch_that_does_not_split_loses_sequences(micro: dict[str, int]):
    """What is left over of the division is in no rank's part, step after step."""
    ranks = 2
    changes = {"training.globalBatchSize": 7, "parallelism.processesPerNode": ranks, **micro}
    for plan, loses in zip(plans("global-batch-not-divisible", changes), (True, False), strict=True):
        training = plan.training
        wanted = global_batch(0, training.global_batch_size, 0, 100)
        seen = [
            sequence
            for micro_step in range(training.gradient_accumulation_steps)
            for rank in range(ranks)
            for sequence in micro_batch(wanted, micro_step, rank, ranks, training.micro_batch_size)
        ]
        assert (sorted(seen) != sorted(wanted)) is loses
