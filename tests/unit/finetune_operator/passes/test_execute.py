from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_job.api.status import Attempt, FineTuneJobStatus, PlanStatus
from finetune_job.conditions import initial_conditions
from finetune_job.reasons import Reason
from finetune_operator.cache.cache import Cache
from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.kinds import BATCH_JOBS, JOBS, NETWORK_POLICIES, PODS, JobKey
from finetune_operator.decide.actions import Actions, Create, Delete, Emit, Ungate
from finetune_operator.passes.execute import Executor, PassOutcome, merge_patch, status_document
from finetune_operator.passes.gather import Gathered, Gatherer
from finetune_operator.passes.recorder import EventRecorder
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock, FakeApi

KEY = JobKey("team", "tune")
NOW = datetime(2026, 1, 2, 3, 5, tzinfo=UTC)
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
class Time:
    now: datetime = NOW


@dataclass
class Scene:
    api: FakeApi
    cache: Cache
    gatherer: Gatherer
    executor: Executor
    time: Time

    async def gathered(self) -> Gathered:
        found = await self.gatherer.gather(KEY, self.time.now)
        assert found is not None
        self.api.calls.clear()
        return found

    def writes(self) -> list[tuple[str, str]]:
        return [(verb, kind) for verb, kind, _ in self.api.calls if verb not in ("get", "list")]


def scene() -> Scene:
    api: Any = FakeApi()
    cache = Cache(Clock())
    for kind, document in ((JOBS, objects.finetune_job()), (BATCH_JOBS, objects.batch_job())):
        cache.take(kind, api.put(kind, document))
    gatherer = Gatherer(api, cache, 5.0)
    time = Time()
    return Scene(api, cache, gatherer, Executor(api, cache, gatherer, EventRecorder(api, "test"), now=lambda: time.now), time)


async def test_status_first_then_deletes_creates_and_events() -> None:
    stage = scene()
    assert await stage.executor.execute(await stage.gathered(), ALL) is PassOutcome.ACTED
    await stage.executor.recorder.flush(60)
    assert stage.writes() == [("patch", "FineTuneJob"), ("delete", "Job"), ("create", "Job"), ("create", "Event")]
    held = stage.cache.job(KEY)
    assert held.document()["status"]["phase"] == "Pending"


async def test_created_child_is_known_before_any_watch_tells_of_it() -> None:
    stage = scene()
    await stage.executor.execute(await stage.gathered(), ALL)
    again = await stage.gatherer.gather(KEY, NOW)
    assert "tune-train-1" in [job.name for job in again.observed.batch_jobs]


async def test_outdated_observation_changes_nothing_and_is_refreshed() -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.put(JOBS, objects.finetune_job(profile="changed"))
    assert await stage.executor.execute(gathered, ALL) is PassOutcome.OUTDATED
    assert stage.writes() == [("patch", "FineTuneJob")]
    held = stage.cache.job(KEY)
    assert held.document()["spec"]["profile"] == "changed"


async def test_failed_status_write_does_nothing_else() -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.fail["patch"] = [ApiUnreachableError("reset")]
    with pytest.raises(ApiUnreachableError):
        await stage.executor.execute(gathered, ALL)
    assert stage.writes() == [("patch", "FineTuneJob")]


async def test_a_status_is_counted_once_the_server_has_taken_it_whatever_follows() -> None:
    stage = scene()
    gathered, counted = await stage.gathered(), list[tuple[FineTuneJobStatus, FineTuneJobStatus]]()
    executor = replace(stage.executor, status_written=lambda job, status: counted.append((job.status, status)))
    stage.api.fail["patch"] = [ApiUnreachableError("reset")]
    with pytest.raises(ApiUnreachableError):
        await executor.execute(gathered, ALL)
    assert counted == []
    stage.api.fail["delete"] = [ApiUnreachableError("reset")]
    with pytest.raises(ApiUnreachableError):
        await executor.execute(gathered, ALL)
    assert counted == [(gathered.observed.job.status, STATUS)]


async def test_deleted_job_is_left_alone() -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.objects.clear()
    assert await stage.executor.execute(gathered, ALL) is PassOutcome.GONE
    assert stage.writes() == [("patch", "FineTuneJob")]


async def test_same_status_is_not_written() -> None:
    stage = scene()
    await stage.executor.execute(await stage.gathered(), Actions(status=STATUS))
    assert await stage.executor.execute(await stage.gathered(), Actions(status=STATUS)) is PassOutcome.UNCHANGED
    assert stage.writes() == []


async def test_own_child_that_exists_already_is_adopted() -> None:
    """The answer to an earlier create was lost, or the operator was killed before it came."""
    stage = scene()
    stage.api.put(BATCH_JOBS, objects.batch_job(attempt=1))
    gathered = await stage.gathered()
    assert await stage.executor.execute(gathered, Actions(creates=ALL.creates)) is PassOutcome.REPEATED
    again = await stage.gathered()
    assert again.observed.conflicts == ()
    assert "tune-train-1" in [job.name for job in again.observed.batch_jobs]


async def test_own_job_that_exists_already_without_its_label_is_deleted_and_created_again() -> None:
    stage = scene()
    unlabelled = objects.batch_job(attempt=1)
    unlabelled["metadata"]["labels"].pop("app.kubernetes.io/managed-by")
    stage.api.put(BATCH_JOBS, unlabelled)
    assert await stage.executor.execute(await stage.gathered(), Actions(creates=ALL.creates)) is PassOutcome.REPEATED
    assert stage.writes() == [("create", "Job"), ("delete", "Job")]
    await stage.executor.execute(await stage.gathered(), Actions(creates=ALL.creates))
    assert "tune-train-1" in [job.name for job in (await stage.gathered()).observed.batch_jobs]


async def test_foreign_object_with_the_childs_name_is_a_conflict_until_it_is_gone() -> None:
    stage = scene()
    foreign = objects.batch_job(attempt=1)
    foreign["metadata"]["ownerReferences"][0] |= {"name": "another", "uid": "another-job"}
    stage.api.put(BATCH_JOBS, foreign)
    assert await stage.executor.execute(await stage.gathered(), Actions(creates=ALL.creates)) is PassOutcome.REPEATED
    assert (await stage.gathered()).observed.conflicts == ("Job/tune-train-1",)
    del stage.api.objects["Job", "team", "tune-train-1"]
    assert (await stage.gathered()).observed.conflicts == ()


async def test_nothing_is_created_after_a_name_that_is_taken() -> None:
    """A Job must not start with a stranger's ConfigMap for its plan."""
    stage = scene()
    foreign = objects.batch_job(attempt=1)
    foreign["metadata"]["ownerReferences"][0]["uid"] = "another-job"
    stage.api.put(BATCH_JOBS, foreign)
    creates = (*ALL.creates, Create(objects.batch_job(attempt=2)))
    await stage.executor.execute(await stage.gathered(), Actions(creates=creates))
    assert stage.writes() == [("create", "Job")]
    assert ("Job", "team", "tune-train-2") not in stage.api.objects


@pytest.mark.parametrize(
    ("changed", "deleting", "told"),
    [
        ({}, True, "vanishing"),
        # The garbage collector will come to it: its owner is gone, since another job has the name.
        ({}, False, "vanishing"),
        ({"name": "another"}, True, "conflicts"),
        ({"name": "another"}, False, "conflicts"),
        ({"apiVersion": "batch/v1", "kind": "CronJob"}, True, "conflicts"),
    ],
)
async def test_what_an_earlier_job_of_this_name_has_left_is_distinguished(
    changed: dict[str, str], deleting: bool, told: str
) -> None:
    stage = scene()
    left = objects.batch_job(attempt=1)
    left["metadata"]["ownerReferences"][0] |= {"uid": "earlier-job"} | changed
    if deleting:
        left["metadata"]["deletionTimestamp"] = objects.CREATED
    stage.api.put(BATCH_JOBS, left)
    await stage.executor.execute(await stage.gathered(), Actions(creates=ALL.creates))
    observed = (await stage.gathered()).observed
    expected = {"vanishing": (), "conflicts": ()} | {told: ("Job/tune-train-1",)}
    assert {"vanishing": observed.vanishing, "conflicts": observed.conflicts} == expected
    del stage.api.objects["Job", "team", "tune-train-1"]
    observed = (await stage.gathered()).observed
    assert (observed.vanishing, observed.conflicts) == ((), ())


async def test_delete_that_meets_nothing_counts_as_done() -> None:
    stage = scene()
    gathered = await stage.gathered()
    del stage.api.objects["Job", "team", "tune-train-0"]
    delete = Delete("Job", "tune-train-0", "tune-train-0-uid")
    assert await stage.executor.execute(gathered, Actions(deletes=(delete,))) is PassOutcome.REPEATED


async def test_every_delete_has_the_uid_as_its_precondition_and_the_force_that_was_decided() -> None:
    stage = scene()
    lost = objects.pod(attempt=0)
    stage.api.put(PODS, lost)
    deletes = (
        Delete("Job", "tune-train-0", "tune-train-0-uid"),
        Delete("Pod", "tune-train-0-0", "tune-train-0-0-uid", force=True),
    )
    await stage.executor.execute(await stage.gathered(), Actions(deletes=deletes))
    assert stage.api.deletes == [
        ("Job", "tune-train-0", "tune-train-0-uid", False),
        ("Pod", "tune-train-0-0", "tune-train-0-0-uid", True),
    ]


async def test_object_of_the_same_name_is_not_deleted_in_the_place_of_the_one_that_was_meant() -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.objects["Job", "team", "tune-train-0"]["metadata"]["uid"] = "its-successor"
    delete = Delete("Job", "tune-train-0", "tune-train-0-uid")
    assert await stage.executor.execute(gathered, Actions(deletes=(delete,))) is PassOutcome.REPEATED
    assert ("Job", "team", "tune-train-0") in stage.api.objects
    # Known to be gone now, so that no later pass deletes it again.
    assert (await stage.gathered()).observed.batch_jobs == ()


@pytest.mark.parametrize("is_held", [True, False], ids=["held by a finalizer", "gone at once"])
async def test_deletion_is_known_before_any_watch_tells_of_it(is_held: bool) -> None:
    stage = scene()
    stage.api.deletes_slowly = is_held
    delete = Delete("Job", "tune-train-0", "tune-train-0-uid")
    assert await stage.executor.execute(await stage.gathered(), Actions(deletes=(delete,))) is PassOutcome.ACTED
    left = (await stage.gathered()).observed.batch_jobs
    assert [job.deleting for job in left] == ([True] if is_held else [])


@pytest.mark.parametrize("is_held", [True, False], ids=["held by a finalizer", "gone at once"])
async def test_what_is_not_watched_is_deleted_by_uid_too(is_held: bool) -> None:
    stage = scene()
    stage.api.deletes_slowly = is_held
    stage.api.put(NETWORK_POLICIES, {"metadata": objects.metadata("tune-run", "policy-uid")})
    gathered = await stage.gathered()
    for uid, outcome in (("its-predecessor", PassOutcome.REPEATED), ("policy-uid", PassOutcome.ACTED)):
        delete = Delete("NetworkPolicy", "tune-run", uid)
        assert await stage.executor.execute(gathered, Actions(deletes=(delete,))) is outcome


async def test_failed_delete_ends_the_pass_before_anything_is_created() -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.fail["delete"] = [ApiError("delete", 403, "Forbidden", "not allowed")]
    with pytest.raises(ApiError):
        await stage.executor.execute(gathered, ALL)
    assert ("create", "Job") not in stage.writes()


UNGATE = Actions(ungates=(Ungate("tune-train-0", "tune-train-0-uid", ()),))
GATES = "kueue.x-k8s.io/admission-gated-by"


def gated(stage: Scene, gates: str = "finetune.dev/preflight") -> None:
    """The Job has gates, and the cache knows."""
    stored = stage.api.objects["Job", "team", "tune-train-0"]
    stored["metadata"].setdefault("annotations", {})[GATES] = gates
    stage.cache.take(BATCH_JOBS, stage.api.put(BATCH_JOBS, stored))


@pytest.mark.parametrize(
    ("before", "remaining", "after"),
    [("finetune.dev/preflight", (), None), ("a.b/c,finetune.dev/preflight,a.b/d", ("a.b/c", "a.b/d"), "a.b/c,a.b/d")],
)
async def test_gate_is_taken_off_and_that_is_known_at_once(before: str, remaining: tuple[str, ...], after: str | None) -> None:
    stage = scene()
    gated(stage, before)
    gathered = await stage.gathered()
    assert gathered.observed.batch_jobs[0].admission_gates == tuple(before.split(","))
    ungate = Actions(ungates=(Ungate("tune-train-0", "tune-train-0-uid", remaining),))
    assert await stage.executor.execute(gathered, ungate) is PassOutcome.ACTED
    assert stage.writes() == [("patch", "Job")]
    assert stage.api.objects["Job", "team", "tune-train-0"]["metadata"]["annotations"].get(GATES) == after
    assert (await stage.gathered()).observed.batch_jobs[0].admission_gates == remaining


async def test_gate_of_a_job_that_took_the_name_stays() -> None:
    stage = scene()
    gated(stage)
    gathered = await stage.gathered()
    stage.api.objects["Job", "team", "tune-train-0"]["metadata"]["uid"] = "its-successor"
    assert await stage.executor.execute(gathered, UNGATE) is PassOutcome.REPEATED
    assert GATES in stage.api.objects["Job", "team", "tune-train-0"]["metadata"]["annotations"]
    assert (await stage.gathered()).observed.batch_jobs == ()


async def test_gate_that_may_not_be_taken_off_is_reported_to_the_next_pass() -> None:
    stage = scene()
    gated(stage)
    stage.api.fail["patch"] = [ApiError("patch", 403, "Forbidden", "cannot patch resource jobs")]
    assert await stage.executor.execute(await stage.gathered(), UNGATE) is PassOutcome.ACTED
    told = (await stage.gathered()).observed.refused
    assert (told.kind, told.name, told.code, told.message) == ("Job", "tune-train-0", 403, "cannot patch resource jobs")
    assert await stage.executor.execute(await stage.gathered(), UNGATE) is PassOutcome.ACTED
    assert (await stage.gathered()).observed.refused is None


@pytest.mark.parametrize("error", [ApiError("patch", 429, "TooManyRequests", "later"), ApiUnreachableError("patch")])
async def test_gate_stays_for_the_next_try_where_the_server_is_busy_or_away(error: Exception) -> None:
    stage = scene()
    gated(stage)
    gathered = await stage.gathered()
    stage.api.fail["patch"] = [error]
    with pytest.raises(type(error)):
        await stage.executor.execute(gathered, UNGATE)
    assert (await stage.gathered()).observed.batch_jobs[0].admission_gates == ("finetune.dev/preflight",)


CREATE = Actions(creates=ALL.creates)
MESSAGE = 'jobs.batch "tune-train-1" is forbidden: exceeded quota: jobs, requested: count/jobs.batch=1, used: 3, limited: 3'


def refused(code: int, reason: str = "Forbidden", message: str = MESSAGE, retry_after: float = 0.0) -> ApiError:
    return ApiError("POST jobs", code, reason, message, retry_after)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (403, MESSAGE),
        (403, "unable to create new content in namespace team because it is being terminated"),
        (404, 'namespaces "team" not found'),
        (422, 'Job.batch "tune-train-1" is invalid: spec.template.spec.containers[0].image: Required value'),
        (400, 'admission webhook "policy.example" denied the request: no'),
        (413, "Request entity too large"),
        (500, 'Internal error occurred: failed calling webhook "policy.example": connection refused'),
    ],
)
async def test_refused_create_is_reported_to_the_next_pass_and_not_tried_before_its_time(code: int, message: str) -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.fail["create"] = [refused(code, message=message)]
    assert await stage.executor.execute(gathered, CREATE) is PassOutcome.ACTED
    again = await stage.gathered()
    told = again.observed.refused
    assert (told.kind, told.name, told.code, told.message, told.tries) == ("Job", "tune-train-1", code, message, 1)
    assert 0 < again.revisit_after_seconds <= 5.0
    assert await stage.executor.execute(again, CREATE) is PassOutcome.REPEATED
    assert stage.writes() == []
    stage.time.now = told.retry_at
    assert await stage.executor.execute(again, CREATE) is PassOutcome.ACTED
    assert (await stage.gathered()).observed.refused is None


async def test_refusals_are_tried_again_less_and_less_often_and_what_follows_is_not_tried_at_all() -> None:
    stage = scene()
    both = Actions(creates=(Create(objects.batch_job(attempt=1)), Create(objects.batch_job(attempt=2))))
    pauses = []
    for tries in range(1, 12):
        gathered = await stage.gathered()
        stage.api.fail["create"] = [refused(403)]
        await stage.executor.execute(gathered, both)
        assert len(stage.writes()) == 1
        told = (await stage.gathered()).observed.refused
        assert told.tries == tries
        pauses.append((told.retry_at - stage.time.now).total_seconds())
        stage.time.now = told.retry_at
    assert pauses[0] == 5.0
    assert 0.75 * 300 <= pauses[-1] <= 300.0
    assert all(1.4 <= later / earlier <= 2.7 for earlier, later in pairwise(pauses[:7]))


@pytest.mark.parametrize(
    "error", [refused(429), refused(500, message="etcdserver: timeout"), refused(409, "Conflict"), refused(401)]
)
async def test_what_passes_by_itself_is_no_refusal(error: ApiError) -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.fail["create"] = [error]
    with pytest.raises(ApiError):
        await stage.executor.execute(gathered, CREATE)
    assert (await stage.gathered()).observed.refused is None


async def test_name_that_is_taken_and_free_again_is_tried_later() -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.fail["create"] = [ApiError("create", 409, "AlreadyExists", "taken")]
    with pytest.raises(ApiError):
        await stage.executor.execute(gathered, CREATE)


async def test_job_that_was_deleted_and_made_again_is_not_written_to() -> None:
    stage = scene()
    gathered = await stage.gathered()
    stage.api.objects["FineTuneJob", "team", "tune"]["metadata"]["uid"] = "its-successor"
    assert await stage.executor.execute(gathered, ALL) is PassOutcome.OUTDATED
    assert stage.writes() == [("patch", "FineTuneJob")]


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
