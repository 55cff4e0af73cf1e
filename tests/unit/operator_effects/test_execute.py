import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_job.api.status import Attempt, FineTuneJobStatus, PlanStatus
from finetune_job.reasons import Reason
from finetune_job.status.conditions import initial_conditions
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.cluster.errors import ApiUnreachableError
from finetune_operator.cluster.execute import Executor, Outcome, merge_patch, status_document
from finetune_operator.cluster.gather import Gathered, Gatherer
from finetune_operator.cluster.kinds import BATCH_JOBS, JOBS
from finetune_operator.cluster.projection import project, utc_now
from finetune_operator.cluster.recorder import Recorder
from finetune_operator.decide.actions import Actions, Create, Delete, Emit
from tests.unit.operator_effects import objects
from tests.unit.operator_effects.fakes import Clock, FakeApi

KEY = JobKey("team", "tune")
STATUS = FineTuneJobStatus(
    observed_generation=1, conditions=initial_conditions(generation=1, now="2026-01-02T03:04:05Z"), phase="Pending"
)
ALL = Actions(
    status=STATUS,
    deletes=(Delete("Job", "tune-train-0", "tune-train-0-uid"),),
    creates=(Create(objects.batch_job(attempt=1)),),
    events=(Emit("Normal", Reason.RESTARTING, "again"),),
)


@dataclass
class Scene:
    api: FakeApi
    cache: Cache
    gatherer: Gatherer
    executor: Executor

    async def gathered(self) -> Gathered:
        found = await self.gatherer.gather(KEY, utc_now())
        assert found is not None
        self.api.calls.clear()
        return found

    def writes(self) -> list[tuple[str, str]]:
        return [(verb, kind) for verb, kind, _ in self.api.calls if verb not in ("get", "list")]


def scene() -> Scene:
    api: Any = FakeApi()
    cache = Cache(Clock())
    for kind, document in ((JOBS, objects.finetune_job()), (BATCH_JOBS, objects.batch_job())):
        cache.apply(kind, project(kind, api.put(kind, document)))
    gatherer = Gatherer(api, cache, 5.0)
    return Scene(api, cache, gatherer, Executor(api, cache, gatherer, Recorder(api, "test")))


def test_status_first_then_deletes_creates_and_events() -> None:
    async def scenario() -> None:
        stage = scene()
        assert await stage.executor.execute(await stage.gathered(), ALL) is Outcome.ACTED
        await stage.executor.recorder.flush(60)
        assert stage.writes() == [("patch", "FineTuneJob"), ("delete", "Job"), ("create", "Job"), ("create", "Event")]
        held = stage.cache.job(KEY)
        assert held is not None
        assert held.document()["status"]["phase"] == "Pending"

    asyncio.run(scenario())


def test_created_child_is_known_before_any_watch_tells_of_it() -> None:
    async def scenario() -> None:
        stage = scene()
        await stage.executor.execute(await stage.gathered(), ALL)
        again = await stage.gatherer.gather(KEY, utc_now())
        assert again is not None
        assert "tune-train-1" in [job.name for job in again.observed.batch_jobs]

    asyncio.run(scenario())


def test_outdated_observation_changes_nothing_and_is_refreshed() -> None:
    async def scenario() -> None:
        stage = scene()
        gathered = await stage.gathered()
        stage.api.put(JOBS, objects.finetune_job(profile="changed"))
        assert await stage.executor.execute(gathered, ALL) is Outcome.OUTDATED
        assert stage.writes() == [("patch", "FineTuneJob")]
        held = stage.cache.job(KEY)
        assert held is not None
        assert held.document()["spec"]["profile"] == "changed"

    asyncio.run(scenario())


def test_failed_status_write_does_nothing_else() -> None:
    async def scenario() -> None:
        stage = scene()
        gathered = await stage.gathered()
        stage.api.fail["patch"] = [ApiUnreachableError("reset")]
        with pytest.raises(ApiUnreachableError):
            await stage.executor.execute(gathered, ALL)
        assert stage.writes() == [("patch", "FineTuneJob")]

    asyncio.run(scenario())


def test_deleted_job_is_left_alone() -> None:
    async def scenario() -> None:
        stage = scene()
        gathered = await stage.gathered()
        stage.api.objects.clear()
        assert await stage.executor.execute(gathered, ALL) is Outcome.GONE
        assert stage.writes() == [("patch", "FineTuneJob")]

    asyncio.run(scenario())


def test_same_status_is_not_written() -> None:
    async def scenario() -> None:
        stage = scene()
        await stage.executor.execute(await stage.gathered(), Actions(status=STATUS))
        assert await stage.executor.execute(await stage.gathered(), Actions(status=STATUS)) is Outcome.UNCHANGED
        assert stage.writes() == []

    asyncio.run(scenario())


def test_own_child_that_exists_already_is_adopted() -> None:
    """The answer to an earlier create was lost, or the operator was killed before it came."""

    async def scenario() -> None:
        stage = scene()
        stage.api.put(BATCH_JOBS, objects.batch_job(attempt=1))
        gathered = await stage.gathered()
        assert await stage.executor.execute(gathered, Actions(creates=ALL.creates)) is Outcome.REPEATED
        again = await stage.gathered()
        assert again.observed.conflicts == ()
        assert "tune-train-1" in [job.name for job in again.observed.batch_jobs]

    asyncio.run(scenario())


def test_foreign_object_with_the_childs_name_is_a_conflict_until_it_is_gone() -> None:
    async def scenario() -> None:
        stage = scene()
        foreign = objects.batch_job(attempt=1)
        foreign["metadata"]["ownerReferences"][0]["uid"] = "another-job"
        stage.api.put(BATCH_JOBS, foreign)
        assert await stage.executor.execute(await stage.gathered(), Actions(creates=ALL.creates)) is Outcome.REPEATED
        assert (await stage.gathered()).observed.conflicts == ("Job/tune-train-1",)
        del stage.api.objects["Job", "team", "tune-train-1"]
        assert (await stage.gathered()).observed.conflicts == ()

    asyncio.run(scenario())


@pytest.mark.parametrize("uid", ["tune-train-0-uid", "the-uid-of-an-earlier-one"])
def test_delete_that_meets_nothing_or_another_object_counts_as_done(uid: str) -> None:
    async def scenario() -> None:
        stage = scene()
        gathered = await stage.gathered()
        if uid == "tune-train-0-uid":
            del stage.api.objects["Job", "team", "tune-train-0"]
        outcome = await stage.executor.execute(gathered, Actions(deletes=(Delete("Job", "tune-train-0", uid),)))
        assert outcome is Outcome.REPEATED

    asyncio.run(scenario())


def test_status_that_has_not_started_has_no_start_time_at_all() -> None:
    """CEL's `has(status.startTime)` would take an empty text for a start and freeze the spec."""
    document = status_document(STATUS)
    assert "startTime" not in document
    assert "plan" not in document
    started = STATUS.model_copy(update={"start_time": "2026-01-02T03:04:05Z", "plan": PlanStatus(hash="h")})
    assert status_document(started)["plan"] == {"hash": "h", "choices": []}


def test_status_survives_the_way_to_the_server_and_back() -> None:
    status = STATUS.model_copy(update={"attempts": [Attempt(number=0), Attempt(number=1, outcome="Failed", counted=True)]})
    document = status_document(status)
    assert document["attempts"][0]["outcome"] == "Running"
    assert FineTuneJobStatus.model_validate(document) == status


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(st.sampled_from("abc"), values.filter(lambda value: value is not None), max_size=3)


def applied(target: Any, patch: Any) -> Any:
    """RFC 7396, as the API server applies it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = applied(result.get(name), value)
    return result


def without_nulls(value: Any) -> Any:
    return {name: without_nulls(item) for name, item in value.items() if item is not None} if isinstance(value, dict) else value


@given(documents, documents)
def test_merge_patch_leads_from_one_document_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    before, after = without_nulls(before), without_nulls(after)
    assert applied(before, merge_patch(before, after)) == after
    assert merge_patch(after, after) == {}
