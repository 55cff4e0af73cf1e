"""A profile says of itself whether jobs can name it, once for each of its generations."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from structlog.testing import capture_logs

from finetune_operator.cache.cache import Cache
from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.kinds import PROFILES
from finetune_operator.side_tasks.profile_status import ProfileStatus
from tests.unit.finetune_operator.fakes import FakeApi

Document = dict[str, Any]
NOW = datetime(2026, 1, 2, 3, 5, tzinfo=UTC)
VALID = {"trainerImage": "registry.test/trainer:1"}
SAYS_TWICE = VALID | {"pods": {"train": {"extraResources": {"cpu": "1"}}}}
"""What the definition takes and the model refuses."""


class Platform:
    """Profiles on a server, a cache that follows it, and what is judged."""

    def __init__(self) -> None:
        self.api, self.cache = FakeApi(), Cache()
        self.judge = ProfileStatus(self.api, self.cache, now=lambda: NOW)  # type: ignore[arg-type]

    def put(self, name: str = "h100", generation: int = 1, status: Document | None = None, **spec: Any) -> None:
        metadata = {"name": name, "uid": f"uid-of-{name}", "generation": generation}
        body = {"metadata": metadata, "spec": spec, **({"status": status} if status is not None else {})}
        self._take(self.api.put(PROFILES, body))

    def _take(self, document: Document) -> None:
        self.cache.apply(PROFILES, self.cache.read(PROFILES, document))
        self.judge.changed.set()

    def settle(self, during: Callable[[], None] = lambda: None) -> int:
        """Let it judge until nothing is left to do; how many writes that took."""
        before = len(self.api.calls)
        self.judge.changed = asyncio.Event()  # an event belongs to one loop

        async def run() -> None:
            task = asyncio.create_task(self.judge.run())
            for _ in range(20):
                await asyncio.sleep(0)
            during()
            for _ in range(20):
                await asyncio.sleep(0)
            task.cancel()
            results = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(results[0], asyncio.CancelledError):
                raise results[0]

        asyncio.run(run())
        return len(self.api.calls) - before

    def ready(self, name: str = "h100") -> tuple[str, str, str]:
        status = self.api.objects["FineTuneProfile", "", name]["status"]
        (condition,) = status["conditions"]
        assert condition["type"] == "Ready"
        assert condition["observedGeneration"] == status["observedGeneration"]
        return condition["status"], condition["reason"], condition["message"]


def test_each_profile_says_whether_jobs_can_name_it() -> None:
    platform = Platform()
    platform.put("good", **VALID)
    platform.put("bad", **SAYS_TWICE)
    platform.put("closed", **VALID, allowedNamespaces=[])
    assert platform.settle() == 3
    assert platform.ready("good") == ("True", "Accepted", "Jobs can use this profile.")
    status, reason, message = platform.ready("bad")
    assert (status, reason) == ("False", "ProfileInvalid")
    assert message.startswith("FineTuneProfile 'bad' is not valid: spec.pods.train.extraResources: ")
    assert "remove it here" in message
    assert platform.ready("closed")[:2] == ("False", "ProfileNotAllowed")


def test_a_profile_that_changes_is_judged_again_and_one_that_does_not_is_not() -> None:
    platform = Platform()
    platform.put(**SAYS_TWICE)
    platform.settle()
    assert platform.settle() == 0
    assert platform.settle(lambda: platform.put(generation=2, **VALID)) == 1
    assert platform.ready()[0] == "True"


def test_another_process_corrects_a_status_once_and_rewrites_no_equal_one() -> None:
    platform = Platform()
    platform.put(**VALID)
    platform.settle()
    written = platform.api.objects["FineTuneProfile", "", "h100"]["status"]
    for status, writes in ((written, 0), ({"conditions": "none", "observedGeneration": 1}, 1), ({"observedGeneration": 1}, 1)):
        restarted = Platform()
        restarted.put(status=status, **VALID)
        assert restarted.settle() == writes
        # A release that judges otherwise has written its own word since: it is left there.
        assert restarted.settle(lambda again=restarted: again.put(status={"observedGeneration": 1}, **VALID)) == 0


@pytest.mark.parametrize(("code", "again"), [(403, 0), (404, 0), (409, 1)])
def test_a_refused_write_ends_nothing(code: int, again: int) -> None:
    platform = Platform()
    platform.put(**VALID)
    platform.api.fail["patch"] = [ApiError("PATCH", code, "", "no")]
    with capture_logs() as logs:
        platform.settle()
    assert [line["event"] for line in logs] == ([] if again else ["profile status not written"])
    # A conflict means that another object of that name came: it is judged when the watch shows it.
    assert platform.settle() == again


def test_a_server_that_does_not_answer_is_asked_again() -> None:
    platform = Platform()
    platform.put(**VALID)
    platform.api.fail["patch"] = [ApiUnreachableError("gone")]
    with pytest.raises(ApiUnreachableError):
        platform.settle()
    platform.settle()
    assert platform.ready()[0] == "True"


def test_a_profile_that_is_gone_is_forgotten() -> None:
    platform = Platform()
    platform.put(**VALID)
    platform.settle()
    (held,) = platform.cache.profiles()
    platform.cache.remove(PROFILES, held)
    platform.settle()
    # Made again, with the generation and, in this test, the UID that it had.
    platform.put(**VALID)
    assert platform.settle() == 1
