"""What evaluations decide, as a pure function of the state in the checkpoint."""

from hypothesis import given
from hypothesis import strategies as st

from finetune_job.plan.run_plan import EarlyStoppingPlan, EvaluationPlan
from finetune_trainer.checkpoint.manifest import RunState
from finetune_trainer.train.policy import after_evaluation, is_evaluation_due, is_stopped_early


def plan(every: int | None = 2, patience: int | None = None, min_delta: float = 0.0) -> EvaluationPlan:
    stopping = EarlyStoppingPlan(patience=patience, min_delta=min_delta) if patience else None
    return EvaluationPlan(every_steps=every, early_stopping=stopping, load_best_model_at_end=True)


def after(
    losses: list[float], policy: EvaluationPlan, state: RunState | None = None, first: int = 1
) -> tuple[RunState, list[bool]]:
    state, bests = state or RunState(), []
    for step, loss in enumerate(losses, first):
        state, is_best = after_evaluation(state, step, loss, policy)
        bests.append(is_best)
    return state, bests


def test_evaluations_come_before_the_first_step_every_so_often_and_last() -> None:
    assert [step for step in range(8) if is_evaluation_due(step, 7, plan(every=3))] == [0, 3, 6, 7]
    assert [step for step in range(8) if is_evaluation_due(step, 7, plan(every=None))] == [0, 7]


def test_the_base_model_is_no_competitor() -> None:
    state, is_best = after_evaluation(RunState(), 0, 1.0, plan(patience=1))
    assert (is_best, state.initial_eval_loss, state.eval_loss, state.best_step) == (False, 1.0, 1.0, None)
    state, is_best = after_evaluation(state, 2, 5.0, plan(patience=1))
    assert (is_best, state.best_eval_loss, state.best_step, state.evaluations_without_improvement) == (True, 5.0, 2, 0)


def test_patience_ends_a_run_that_no_longer_gets_better() -> None:
    policy = plan(patience=2)
    state, bests = after([3.0, 2.0, 2.5, 2.0], policy)
    assert bests == [True, True, False, False]
    assert (state.best_step, state.best_eval_loss) == (2, 2.0)
    assert is_stopped_early(state, policy)
    assert not is_stopped_early(after([3.0, 2.0, 2.5, 1.9], policy)[0], policy)
    assert not is_stopped_early(state, plan(patience=None))


def test_a_small_gain_is_a_new_best_and_no_improvement() -> None:
    state, bests = after([3.0, 2.75, 2.5], plan(patience=2, min_delta=0.25))
    assert bests == [True, True, True]
    assert state.best_step == 3
    assert state.evaluations_without_improvement == 2
    assert after([3.0, 2.5], plan(patience=2, min_delta=0.25))[0].evaluations_without_improvement == 0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(0, 19), st.integers(1, 4), st.sampled_from([0.0, 0.5]))
def test_state_in_a_checkpoint_carries_all_that_decides(losses: list[float], cut: int, patience: int, min_delta: float) -> None:
    policy = plan(patience=patience, min_delta=min_delta)
    undisturbed, bests = after(losses, policy)
    before, early = after(losses[:cut], policy)
    restored = RunState.model_validate_json(before.model_dump_json())
    resumed, late = after(losses[cut:], policy, restored, first=len(losses[:cut]) + 1)
    assert (resumed, early + late) == (undisturbed, bests)
    assert undisturbed.best_eval_loss == min(losses)
    assert undisturbed.best_step == losses.index(min(losses)) + 1
