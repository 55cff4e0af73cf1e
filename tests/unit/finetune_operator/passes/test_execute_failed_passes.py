"""The one write that tells users of passes that fail."""

import asyncio
from typing import Any

import pytest

from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import project
from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.kinds import JOBS, JobKey
from finetune_operator.passes.execute import LONGEST_WORDS, Executor, words_of
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock, FakeApi

KEY = JobKey("team", "tune")
UNUSED: Any = None
DENIED = ApiError("GET /api/v1/x", 403, "Forbidden", "no")


def told(document: dict[str, Any], *, times: int = 1) -> tuple[FakeApi, dict[str, Any]]:
    api, cache = FakeApi(), Cache(Clock())
    fake: Any = api
    cache.apply(JOBS, project(JOBS, api.put(JOBS, document)))
    for _ in range(times):
        asyncio.run(Executor(fake, cache, UNUSED, UNUSED).report_failure(KEY, DENIED))
    return api, api.objects["FineTuneJob", "team", "tune"].get("status", {})


def test_a_job_that_nobody_could_look_at_says_why_and_says_it_once() -> None:
    api, status = told(objects.finetune_job(), times=3)
    ready = next(one for one in status["conditions"] if one["type"] == "Ready")
    assert ready["message"].endswith("GET /api/v1/x: 403 Forbidden: no")
    assert status["phase"] == "Pending"
    assert [verb for verb, *_ in api.calls] == ["patch"]


def test_a_status_keeps_its_other_fields_and_its_phase() -> None:
    before = {
        "phase": "Training",
        "attempt": 3,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Running", "lastTransitionTime": objects.CREATED}],
    }
    _, status = told(objects.finetune_job(status=before))
    assert (status["phase"], status["attempt"]) == ("Training", 3)


def test_a_job_that_is_unknown_or_being_deleted_is_left_alone() -> None:
    document = objects.finetune_job()
    document["metadata"]["deletionTimestamp"] = objects.CREATED
    assert told(document)[0].calls == []
    fake: Any = FakeApi()
    asyncio.run(Executor(fake, Cache(Clock()), UNUSED, UNUSED).report_failure(KEY, DENIED))
    assert fake.calls == []


def test_a_job_that_has_changed_since_is_not_written_over() -> None:
    api, cache = FakeApi(), Cache(Clock())
    fake: Any = api
    cache.apply(JOBS, project(JOBS, api.put(JOBS, objects.finetune_job())))
    api.put(JOBS, objects.finetune_job())
    with pytest.raises(ApiError, match="Conflict"):
        asyncio.run(Executor(fake, cache, UNUSED, UNUSED).report_failure(KEY, DENIED))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ApiError("GET /x", 403, "Forbidden", "cannot\n get"), "GET /x: 403 Forbidden: cannot get"),
        (
            ApiError("GET /x", 500, "", "webhook https://me:pw@host/ said Bearer abc.def"),
            "GET /x: 500 : webhook https://***host/ said ***",
        ),
        (ApiError("GET /x", 400, "", "token eyJhbGciOi.J9-x_.a is bad"), "GET /x: 400 : token *** is bad"),
        (ApiUnreachableError("GET /x: the answer is not JSON: b'...'"), "the API server does not answer."),
        (ValueError("input_value='what the manifest says'"), "an unexpected ValueError; see the operator's log."),
    ],
)
def test_words_have_no_secrets(error: Exception, expected: str) -> None:
    assert words_of(error) == expected


def test_words_are_bounded() -> None:
    said = words_of(ApiError("GET /x", 403, "Forbidden", "x" * 100_000))
    assert len(said) == LONGEST_WORDS
    assert said.endswith("...")
