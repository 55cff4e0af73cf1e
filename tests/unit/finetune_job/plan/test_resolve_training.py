"""Batches, learning rate, checkpoints and evaluation of a plan."""

import math

from hypothesis import given
from hypothesis import strategies as st

from finetune_job.api.job import parse_job
from finetune_job.plan.resolve import resolve
from finetune_job.plan.resolve_training import micro_batch_sizes
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from tests.unit.finetune_job.api.test_job import changed

IDENTITY = JobIdentity(namespace="team", name="run", uid="0123456789ab")


def plan(path: str = "spec.training.epochs", value: object = 1) -> RunPlan:
    return resolve(IDENTITY, parse_job(changed(path, value)).spec, None)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_batches_multiply_out(accumulated: int, nodes: int, processes: int) -> None:
    spec = changed("spec.training", {"epochs": 1, "globalBatchSize": accumulated * nodes * processes})
    spec["spec"]["parallelism"] = {"nodes": nodes, "processesPerNode": processes}
    training = resolve(IDENTITY, parse_job(spec).spec, None).training
    assert training.micro_batch_size * training.gradient_accumulation_steps * nodes * processes == training.global_batch_size


@given(st.integers(1, 10_000))
def test_the_chosen_micro_batch_divides(share: int) -> None:
    assert share % micro_batch_sizes(share)[0] == 0
    assert micro_batch_sizes(share)[0] >= math.gcd(share, 8)


def test_rates_follow_the_method_and_what_is_written_is_kept() -> None:
    assert plan().training.learning_rate == 2e-4
    assert plan("spec.method.type", "Full").training.learning_rate == 2e-5
    written = plan("spec.training.adamBeta2", "0.95").training
    assert (written.adam_betas, written.adam_epsilon, written.momentum) == ((0.9, 0.95), 1e-8, 0.9)


def test_only_a_large_state_is_written_in_the_background() -> None:
    assert not plan().checkpoint.asynchronous
    assert plan("spec.method.type", "Full").checkpoint.asynchronous
    assert plan("spec.checkpoint.asynchronous", True).checkpoint.asynchronous


def test_early_stopping_is_taken_from_the_manifest() -> None:
    assert plan().evaluation.early_stopping is None
    stopping = plan("spec.evaluation", {"everySteps": 5, "earlyStopping": {"minDelta": "0.01"}}).evaluation.early_stopping
    assert stopping is not None
    assert (stopping.patience, stopping.min_delta) == (3, 0.01)
