"""When a pass is followed by another one. The queue is the real one on a clock of its own; what a pass meets is scripted."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_job.api.status import Condition, FineTuneJobStatus
from finetune_job.conditions import find_condition, initial_conditions, with_condition
from finetune_job.finding import Finding
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.cache.projection import project
from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.kinds import CONFIG_MAPS, JOBS, JobKey
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.seen.observed import JobView, Observed, ProfileView
from finetune_operator.passes.execute import PassOutcome
from finetune_operator.passes.gather import Gathered
from finetune_operator.passes.worker import MOST_ACTS_IN_A_ROW, Worker, urgency
from finetune_operator.queue.workqueue import Urgency, WorkQueue
from tests.support.builders import a_job
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock

KEY = JobKey("team", "tune")
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
Script = Callable[[], PassOutcome | Exception]


@dataclass
class Instruments:
    """What a pass reported."""

    results: list[str] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    findings: list[tuple[str, str]] = field(default_factory=list)

    def reconciled(self, seconds: float, result: str) -> None:
        self.results.append(result)

    def judged(self, cpu_seconds: float) -> None:
        self.cpu.append(cpu_seconds)

    def found(self, rule: str, severity: str) -> None:
        self.findings.append((rule, severity))


def observed(status: FineTuneJobStatus | None = None, **job: Any) -> Observed:
    view = JobView(
        namespace="team",
        name="tune",
        uid="job-uid",
        generation=1,
        resource_version="1",
        spec=a_job().parse().spec,
        status=status or FineTuneJobStatus(),
    )
    claims = frozenset({"models", "data", "results", "scratch"})
    return Observed(job=replace(view, **job), profile=ProfileView("default", spec=a_job().profile), claims=claims)


@dataclass
class Scripted:
    """Gatherer and executor in one: says what is observed, and how the pass ends."""

    ends: Script
    clock: Clock
    seen: Observed | None = field(default_factory=observed)
    revisit: float | None = None
    gather_cpu: float = 0.0
    passes: list[float] = field(default_factory=list)
    executed: list[Actions] = field(default_factory=list)

    async def gather(self, key: JobKey, now: datetime) -> Gathered | None:
        self.passes.append(self.clock.now)
        return None if self.seen is None else Gathered(self.seen, {}, self.revisit, self.gather_cpu)

    async def execute(self, gathered: Gathered, actions: Actions) -> PassOutcome:
        self.executed.append(actions)
        end = self.ends()
        if isinstance(end, Exception):
            raise end
        return end

    async def report_failure(self, key: JobKey, error: Exception) -> None:
        """Not looked at."""


@dataclass
class Scene:
    clock: Clock
    queue: WorkQueue[JobKey]
    cluster: Scripted
    worker: Worker
    instruments: Instruments

    async def work_for(self, seconds: float, most_passes: int = 1000) -> list[float]:
        """Work as the loop would for so long; no time passes but in waiting. Returns when the passes began, from 0."""
        begun = self.clock.now
        for _ in range(most_passes):
            self.queue._collect_due()
            if len(self.queue):
                key = await self.queue.get()
                self.instruments.reconciled(0.0, await self.worker._handle(key))
                self.queue.done(key)
                continue
            pause = self.queue._seconds_to_next()
            if pause is None or self.clock.now + pause > begun + seconds:
                break
            self.clock.now += pause + 1e-6
        else:
            raise AssertionError(f"{most_passes} passes within {self.clock.now - begun} s")
        return [round(moment - begun, 2) for moment in self.cluster.passes]


def scene(ends: Script, **cluster: Any) -> Scene:
    """With the job in the queue."""
    clock = Clock()
    queue: WorkQueue[JobKey] = WorkQueue(retry_first=0.5, retry_longest=60.0, clock=clock)
    queue.add(KEY)
    instruments = Instruments()
    scripted = Scripted(ends, clock, **cluster)
    both: Any = scripted
    cpu = itertools.repeat(0.0)
    worker = Worker(queue, both, both, instruments, lambda: NOW, cpu_clock=lambda: next(cpu))
    return Scene(clock, queue, scripted, worker, instruments)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


def in_turn(*ends: PassOutcome | Exception) -> Script:
    """These one after the other, then nothing to do."""
    rest = iter(ends)
    return lambda: next(rest, PassOutcome.UNCHANGED)


def test_pass_with_an_effect_is_followed_at_once_until_there_is_nothing_to_do() -> None:
    stage = scene(in_turn(PassOutcome.ACTED, PassOutcome.ACTED))
    assert run(stage.work_for(3600)) == [0.0, 0.0, 0.0]
    assert stage.instruments.results == ["acted", "acted", "unchanged"]


@pytest.mark.parametrize("end", [PassOutcome.REPEATED, PassOutcome.OUTDATED])
def test_pass_without_effect_is_followed_after_pauses_that_grow(end: PassOutcome) -> None:
    stage = scene(lambda: end)
    assert run(stage.work_for(100)) == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 63.5]


def test_error_is_followed_after_pauses_that_grow_and_after_what_the_server_asks_for() -> None:
    asked = ApiError("POST", 429, "TooManyRequests", "later", 30.0)
    ends = in_turn(ApiUnreachableError("reset"), ApiError("POST", 500, "", "", 0.0), asked, ValueError("a defect"))
    stage = scene(ends)
    assert run(stage.work_for(100)) == [0.0, 0.5, 1.5, 31.5, 35.5]
    assert stage.instruments.results == ["error", "error", "error", "defect", "unchanged"]


def test_success_lets_the_next_failure_start_from_the_shortest_pause() -> None:
    ends = in_turn(PassOutcome.REPEATED, PassOutcome.REPEATED, PassOutcome.UNCHANGED, PassOutcome.REPEATED)
    stage = scene(ends)
    assert run(stage.work_for(1.6)) == [0.0, 0.5, 1.5]
    stage.queue.add(KEY)
    stage.cluster.passes.clear()
    before = stage.clock.now
    run(stage.work_for(100))
    assert [round(moment - before, 2) for moment in stage.cluster.passes] == [0.0, 0.5]


def test_effect_does_not_make_a_job_that_fails_in_between_forget_its_pauses() -> None:
    stage = scene(in_turn(*(PassOutcome.ACTED, ApiUnreachableError("reset")) * 4))
    assert run(stage.work_for(100)) == [0.0, 0.0, 0.5, 0.5, 1.5, 1.5, 3.5, 3.5, 7.5]


def test_job_that_acts_for_ever_is_stopped_for_a_pause() -> None:
    stage = scene(lambda: PassOutcome.ACTED)
    passes = run(stage.work_for(600))
    assert passes[: MOST_ACTS_IN_A_ROW + 1] == [0.0] * (MOST_ACTS_IN_A_ROW + 1)
    assert passes[MOST_ACTS_IN_A_ROW + 1 : MOST_ACTS_IN_A_ROW + 4] == [0.5, 1.5, 3.5]
    assert len(passes) < 30


def test_job_that_is_gone_is_left_alone_and_nothing_of_it_stays() -> None:
    stage = scene(in_turn(PassOutcome.ACTED, ApiUnreachableError("reset")))
    run(stage.work_for(0.1))
    stage.cluster.seen = None
    run(stage.work_for(3600))
    assert stage.instruments.results == ["acted", "error", "gone"]
    assert not stage.worker._acts
    assert (stage.queue.num_delayed, stage.queue._failures, stage.queue._resting) == (0, {}, {})


def test_job_is_looked_at_again_when_the_earlier_of_two_says_so_and_not_at_once() -> None:
    stage = scene(in_turn(), revisit=5.0)
    assert run(stage.work_for(11)) == [0.0, 5.0, 10.0]
    # A claim that is missing is looked for every 30 s, whenever else the job is looked at.
    for revisit, expected in ((40.0, [0.0, 30.0]), (None, [0.0, 30.0]), (20.0, [0.0, 20.0, 40.0])):
        stage = scene(in_turn(), revisit=revisit, seen=replace(observed(), claims=frozenset()))
        assert run(stage.work_for(45)) == expected
    stage = scene(in_turn(), revisit=0.0)
    assert run(stage.work_for(0.12)) == [0.0, 0.05, 0.1]


def test_findings_are_counted_once_they_are_written() -> None:
    bad = observed(spec=None, spec_error="spec.training: is missing")
    stage = scene(in_turn(ApiUnreachableError("reset"), PassOutcome.ACTED), seen=bad)
    run(stage.work_for(0.1))
    assert stage.instruments.findings == []
    run(stage.work_for(1))
    assert stage.instruments.findings == [(Finding.model_validate(find_of(stage)).rule, "error")]


def find_of(stage: Scene) -> dict[str, Any]:
    status = stage.cluster.executed[-1].status
    return dict(status.findings[0].model_dump())


def test_job_that_takes_much_cpu_to_read_or_to_judge_is_looked_at_less_often() -> None:
    stage = scene(in_turn(), gather_cpu=2.0, revisit=1.0)
    assert run(stage.work_for(100)) == [0.0, 40.0, 80.0]
    seconds = itertools.count(0.0, 1.5)
    stage = scene(in_turn(), revisit=1.0)
    stage.worker = replace(stage.worker, cpu_clock=lambda: next(seconds))
    assert run(stage.work_for(70)) == [0.0, 30.0, 60.0]
    assert stage.instruments.cpu == [1.5, 1.5, 1.5]


async def test_events_of_one_job_cannot_make_it_use_more_than_its_share() -> None:
    stage = scene(in_turn(), gather_cpu=0.01)
    for _ in range(1000):
        stage.queue.add(KEY)
        await stage.work_for(0.01)
        stage.clock.now += 0.01
    assert len(stage.cluster.passes) <= 51


def test_newcomer_is_distinguished_from_a_job_that_has_an_answer() -> None:
    assert urgency(None) is Urgency.NEW
    assert urgency(project(JOBS, objects.finetune_job())) is Urgency.NEW
    answered = {"conditions": [{"type": "Validated", "status": "Unknown", "reason": "NotObserved"}]}
    assert urgency(project(JOBS, objects.finetune_job(status=answered))) is Urgency.CHANGED
    assert urgency(project(CONFIG_MAPS, {"metadata": objects.metadata("a", "u")})) is Urgency.NEW


async def test_worker_ends_with_the_queue_and_gives_back_the_key_whatever_happens() -> None:
    def closing() -> PassOutcome:
        stage.queue.close()
        return PassOutcome.UNCHANGED

    stage = scene(closing)
    await stage.worker.run()
    assert stage.instruments.results == ["unchanged"]
    assert stage.queue.num_taken == 0


def test_the_loop_goes_round_between_any_two_passes() -> None:
    """Thirty passes that are due together hold up a probe or a lease for one of them, not for thirty."""
    num = 30
    rounds: list[int] = []

    async def work() -> None:
        stage = scene(lambda: PassOutcome.UNCHANGED)
        gather, now = stage.cluster.gather, 0

        async def noted(key: JobKey, moment: datetime) -> Gathered | None:
            rounds.append(now)
            return await gather(key, moment)

        stage.cluster.gather = noted  # type: ignore[method-assign]
        stage.instruments.judged = lambda cpu_seconds: rounds.append(now)  # type: ignore[method-assign]
        for number in range(1, num):
            stage.queue.add(JobKey("team", f"tune-{number}"))
        workers = [asyncio.create_task(stage.worker.run()) for _ in range(num)]
        while len(stage.instruments.results) < num:
            now += 1
            await asyncio.sleep(0)
        stage.queue.close()
        await asyncio.gather(*workers)

    run(work())
    assert len(rounds) == 2 * num, "each is read once and judged once"
    assert len(set(rounds)) == 2 * num, rounds


@pytest.mark.parametrize("error", [ApiError("GET", 403, "Forbidden", "no"), ValueError("a defect")])
def test_from_the_eighth_failure_in_a_row_on_users_are_reported_and_a_pass_that_ends_well_ends_the_row(error: Exception) -> None:
    told: list[tuple[float, Exception]] = []
    row = [error] * 9
    stage = scene(in_turn(error, PassOutcome.ACTED, *row, PassOutcome.UNCHANGED, *row))

    async def tell(key: JobKey, failure: Exception) -> None:
        assert key == KEY
        told.append((int(stage.clock.now - begun), failure))
        raise ApiUnreachableError("reset")

    stage.cluster.report_failure, begun = tell, stage.clock.now  # type: ignore[attr-defined]
    stage.queue.add(KEY)
    run(stage.work_for(600))
    # After 0.5, 1, 2, 4, 8, 16, 32 and 60 s: the first failure is not in the row, and its pause is not forgotten.
    assert told == [(123, error), (183, error)]
    assert stage.worker._failures == {}
    stage.queue.add(KEY)
    run(stage.work_for(600))
    assert len(told) == 4


def test_an_error_that_is_reported_stays_until_a_pass_has_ended_well() -> None:
    conditions = with_condition(
        initial_conditions(generation=1, now="2026-01-01T00:00:00Z"),
        ConditionType.READY,
        False,
        Reason.OPERATOR_ERROR,
        "no",
        generation=1,
        now="2026-01-01T00:00:00Z",
    )
    stage = scene(in_turn(ValueError("a defect")), seen=observed(status=FineTuneJobStatus(conditions=conditions)))
    assert run(stage.work_for(1)) == [0.0, 0.5, 0.5], "after the one that went well another follows at once"
    reasons = [ready.reason for ready in map(ready_of, stage.cluster.executed) if ready is not None]
    assert reasons[0] != Reason.OPERATOR_ERROR, "the first pass of this process knows of no failure"
    assert reasons[1] == Reason.OPERATOR_ERROR
    assert reasons[2] != Reason.OPERATOR_ERROR


def ready_of(actions: Actions) -> Condition | None:
    return None if actions.status is None else find_condition(actions.status.conditions, ConditionType.READY)
