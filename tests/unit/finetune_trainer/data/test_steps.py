"""How many sequences there are, and what follows for batches and steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_job.plan.run_plan import Choice
from finetune_trainer.data.packing import pack
from finetune_trainer.data.steps import _num_packed, check_steps, fit_batch
from tests.support.tiny_model import plan_of, tiny_spec

MICRO, GLOBAL = "spec.training.microBatchSize", "spec.training.globalBatchSize"


def plan(ranks=1, packing=True, **training):
    fields = {"globalBatchSize": None, "microBatchSize": None, **training}
    return plan_of(tiny_spec(training=fields, parallelism={"processesPerNode": ranks}, data={"packing": packing}))


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 50))
def test_sequences_are_counted_as_packing_makes_them(lengths, limit):
    assert _num_packed(lengths, limit) == len(pack(lengths, limit)[1])


@pytest.mark.parametrize(
    ("ranks", "training", "num_sequences", "chosen"),
    [
        (1, {}, 100, {GLOBAL: 16, MICRO: 8}),
        (1, {}, 10, {GLOBAL: 10, MICRO: 5}),
        (3, {}, 10, {GLOBAL: 9, MICRO: 3}),
        (24, {}, 100, {GLOBAL: 24, MICRO: 1}),
        (2, {"microBatchSize": 3}, 100, {GLOBAL: 18}),
        (2, {"microBatchSize": 3}, 13, {GLOBAL: 12}),
        # No step can be filled: refused with the batch that was chosen for the plan.
        (4, {}, 3, {GLOBAL: 16, MICRO: 4}),
        # What the user set stays.
        (1, {"globalBatchSize": 16}, 10, {MICRO: 8}),
    ],
)
def test_an_open_batch_is_what_ranks_and_records_can_fill(ranks, training, num_sequences, chosen):
    job = plan(ranks, **training)
    largest = job.training.micro_batch_size
    made = () if "microBatchSize" in training else (Choice(field=MICRO, value=largest, reason="fits"),)
    choices = fit_batch(job, num_sequences, made)
    assert {choice.field: choice.value for choice in choices} == chosen
    assert job.wrong_choice(choices) is None
    fitted = job.with_choices(choices)
    assert fitted.training.global_batch_size == chosen.get(GLOBAL, 16)
    per_step = fitted.training.micro_batch_size * fitted.training.gradient_accumulation_steps * ranks
    assert per_step == fitted.training.global_batch_size
    refused = [finding.rule for finding in check_steps(fitted, num_sequences, num_sequences)]
    assert refused == (["fewer-sequences-than-batch"] if fitted.training.global_batch_size > num_sequences else [])


@pytest.mark.parametrize("value", [0, 3, 32, "16", None])
def test_a_batch_that_preflight_cannot_have_chosen_is_wrong(value):
    job = plan(2)
    wrong = job.wrong_choice([Choice(field=GLOBAL, value=value, reason=""), Choice(field=MICRO, value=1, reason="")])
    assert (wrong.field, wrong.value) == (GLOBAL, value)


def test_a_micro_batch_must_fit_the_chosen_batch():
    choices = [Choice(field=MICRO, value=8, reason=""), Choice(field=GLOBAL, value=10, reason="")]
    assert plan(1).wrong_choice(choices) == choices[0]


@pytest.mark.parametrize(
    ("packing", "epochs", "occurrences", "steps"),
    [
        (True, 1, 3600, "15 steps with a batch of 16; without packing it would have 225"),
        (True, 2, 3600, None),  # 29 steps
        (True, 1, 470, None),  # 15 of 30 steps
        (False, 1, 230, None),
    ],
)
def test_few_steps_that_packing_leaves_are_told(packing, epochs, occurrences, steps):
    job = plan(packing=packing, epochs=epochs, maxSteps=None)
    found = list(check_steps(job, 230, occurrences))
    assert [finding.rule for finding in found] == ([] if steps is None else ["packing-leaves-few-steps"])
    assert all(steps in finding.message and finding.severity == "warning" for finding in found)


def test_steps_without_packing_are_counted_with_the_batch_that_they_would_have():
    assert list(check_steps(plan(epochs=1, maxSteps=None), 1, 20)) == []
    (finding,) = check_steps(plan(ranks=2, epochs=1, maxSteps=None), 1, 10)
    assert "set spec.data.packing: false, which gives 10 sequences" in finding.fix
