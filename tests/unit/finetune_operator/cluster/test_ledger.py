"""The object that usage is counted in: each write counts once, what cannot be read is kept, and jobs outlive refusals."""

from __future__ import annotations

import asyncio
import base64
import random
import string
import zlib
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.cluster.accounts import Accounts
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.kinds import CONFIG_MAPS, JOBS
from finetune_operator.cluster.ledger import KEY, UNREADABLE, read_ledger
from finetune_operator.cluster.projection import project
from finetune_operator.decide.observed import JobView
from finetune_operator.decide.usage_totals import UsageTotals
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.fakes import FakeApi
from tests.unit.finetune_operator.cluster.usage_scene import BEGUN, LABELS, STARTED, Scene, cancel, job, run, status_of


class SlowApi(FakeApi):
    """Others have their turn while it writes."""

    async def replace(self, *arguments: Any) -> Any:
        await asyncio.sleep(0.001)
        return await super().replace(*arguments)


class LosingApi(FakeApi):
    """Carries writes out whose answers are lost."""

    loses = False

    async def replace(self, *arguments: Any) -> Any:
        answer = await super().replace(*arguments)
        if self.loses:
            raise ApiUnreachableError("reset")
        return answer


def test_a_write_whose_answer_was_lost_counts_once() -> None:
    async def scenario() -> None:
        api = LosingApi()
        scene = Scene(api)
        await scene.count_until(40)
        scene.now = 60
        scene.cache.remove(JOBS, project(JOBS, objects.finetune_job(20, STARTED)))
        api.loses = True
        with pytest.raises(ApiUnreachableError):
            await scene.accounts.run()
        api.loses = False
        await scene.count_until(75)
        assert scene.accounts.totals()[LABELS].gpu_seconds == {"lost": 4 * 50}

    asyncio.run(scenario())


def test_passes_that_end_jobs_at_the_same_time_share_a_write() -> None:
    async def scenario(scene: Scene) -> None:
        scene.api = SlowApi()
        scene.accounts = scene.another_life()
        await scene.count_until(15)
        for number in range(20):
            document = objects.finetune_job(30 + number, STARTED, uid=f"uid-{number}")
            document["metadata"]["name"] = f"tune-{number}"
            scene.take(JOBS, document)
        views = [
            JobView("team", f"tune-{number}", f"uid-{number}", 1, "2", spec=None, status=status_of()) for number in range(20)
        ]
        await asyncio.gather(*(scene.accounts.decided(view, status_of(True)) for view in views))
        assert scene.writes() <= 3, "one opened the account of the first job, one was under way, one is for all others"
        assert not any(totals.ended for totals in scene.accounts.totals().values()), "no status says so yet"

    run(scenario)


@pytest.mark.parametrize("end", [ApiUnreachableError("reset"), ApiError("PUT", 500, "", "later")])
def test_an_end_that_cannot_be_put_on_record_puts_the_pass_off(end: Exception) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.count_until(15)
        scene.api.fail["replace"] = [end]
        with pytest.raises(type(end)):
            await scene.accounts.decided(job(status_of()), status_of(True, finished=True))
        await scene.accounts.decided(job(status_of()), status_of(True, finished=True))
        ended = [{"type": kind, "status": "True", "reason": "Completed"} for kind in ("Succeeded", "Finished")]
        scene.show_job(40, {**STARTED, "conditions": ended})
        await scene.count_until(60)
        assert scene.accounts.totals()[LABELS].ended == {"Succeeded|Completed": 1}

    run(scenario)


def test_without_the_right_jobs_go_on_uncounted_and_are_counted_once_it_is_given() -> None:
    async def scenario(scene: Scene) -> None:
        scene.api.fail["get"] = [ApiError("GET", 403, "Forbidden", "no")]
        await scene.count_until(60)
        await scene.accounts.decided(job(status_of()), status_of(True))
        assert scene.writes() == 0
        await scene.count_until(80)
        assert scene.writes() == 1

    run(scenario)


HOOK_IS_DOWN = ApiError("PUT", 500, "InternalError", "failed calling webhook")
OVERLOADED = ApiError("PUT", 500, "InternalError", "etcdserver: too many requests")


@pytest.mark.parametrize("code", [400, 403, 404, 405, 413, 422, 451])
def test_a_refusal_lets_the_pass_go_on_at_once_and_what_it_decided_is_counted_later_and_once(code: int) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.count_until(15)
        scene.api.fail["replace"] = [ApiError("PUT", code, "", "no")]
        await scene.accounts.decided(job(status_of()), status_of(True, finished=True))
        ended = [{"type": kind, "status": "True", "reason": "Completed"} for kind in ("Succeeded", "Finished")]
        scene.show_job(40, {**STARTED, "conditions": ended})
        for until in (60, 75, 90):
            await scene.count_until(until)
            assert scene.accounts.totals()[LABELS].ended == {"Succeeded|Completed": 1}

    run(scenario)


@pytest.mark.parametrize("error", [OVERLOADED, ApiError("PUT", 401, "Unauthorized", "no"), ApiUnreachableError("timeout")])
def test_an_error_that_does_not_pass_puts_passes_off_for_two_minutes_and_then_only_the_rounds_try_again(error: Exception) -> None:
    told: list[str] = []

    async def scenario(scene: Scene) -> None:
        fake: Any = scene.api
        clock = lambda: BEGUN + timedelta(seconds=scene.now)  # noqa: E731
        scene.accounts = Accounts(fake, scene.cache, "system", "tuning-accounts", clock, failed=lambda: told.append("failed"))
        await scene.count_until(15)
        scene.api.fail["replace"] = [error] * 5
        for second in (100, 219):
            scene.now = second
            with pytest.raises(type(error)):
                await scene.accounts.decided(job(status_of()), status_of(True))
        scene.now = 220
        await scene.accounts.decided(job(status_of()), status_of(True))
        assert len(scene.api.fail["replace"]) == 2
        await scene.accounts.decided(job(status_of()), status_of(True))
        assert len(scene.api.fail["replace"]) == 2, "no pass waits for another answer"
        assert told == []
        for second in (235, 250, 265):
            await scene.count_until(second)
        assert told == ["failed", "failed"], "once a round, for as long as it lasts"
        scene.api.fail["replace"] = [error]
        with pytest.raises(type(error)):
            await scene.accounts.decided(job(status_of()), status_of(False))

    run(scenario)


def test_passes_that_wait_for_their_turn_to_write_go_on_as_soon_as_it_is_known_that_nothing_can_be_written() -> None:
    class RefusingApi(SlowApi):
        async def replace(self, *arguments: Any) -> Any:
            await asyncio.sleep(0.001)
            self.calls.append(("replace", "ConfigMap", ""))
            raise HOOK_IS_DOWN

    async def scenario(scene: Scene) -> None:
        await scene.count_until(15)
        refusing = RefusingApi()
        refusing.objects = scene.api.objects
        scene.api, before = refusing, scene.accounts
        scene.accounts = scene.another_life()
        assert before is not scene.accounts
        await asyncio.gather(*(scene.accounts.decided(job(status_of()), status_of(True)) for _ in range(20)))
        assert scene.writes() == 1

    run(scenario)


def compressed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


OF_A_JOB = '{"jobs":{"job-uid":{"labels":["n","t","m","q","p","g"],%s}}}'
OF_ALL = '{"groups":[{"labels":["n","t","m","q","p","g",%s],"totals":{%s}}]}'


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"binaryData": {KEY: "bm90aGluZw=="}},
        {"binaryData": "x"},
        {"binaryData": {KEY: 7}},
        {"binaryData": {KEY: compressed("[]")}},
        {"binaryData": {KEY: compressed(OF_A_JOB % '"pending":{"train":"Collective|true"}')}},
        {"binaryData": {KEY: compressed(OF_A_JOB % '"at":NaN')}},
        {"binaryData": {KEY: compressed(OF_ALL % ('"dear"', ""))}},
        {"binaryData": {KEY: compressed(OF_ALL % ('""', '"durations":{"queue":{"counts":[1]}}'))}},
    ],
)
def test_what_cannot_be_read_begins_at_zero(data: dict[str, Any]) -> None:
    async def scenario(scene: Scene) -> None:
        scene.api.put(CONFIG_MAPS, {"metadata": {"name": "tuning-accounts", "namespace": "system"}, **data})
        await scene.count_until(60)
        assert scene.accounts.totals() == {LABELS: UsageTotals()}
        assert scene.api.objects["ConfigMap", "system", "tuning-accounts"]["binaryData"][KEY] not in ("", "bm90aGluZw==")

    run(scenario)


def test_however_many_namespaces_and_teams_there_are_the_object_has_a_bounded_size() -> None:
    """Teams in random letters, so that nothing of them can be compressed."""
    letters = random.Random("teams")

    async def scenario(scene: Scene) -> None:
        await scene.count_until(100)
        team = lambda: "".join(letters.choices(string.ascii_letters + string.digits, k=63))  # noqa: E731
        for number in range(1200):
            labels = {"finetune.dev/team": team()}
            await cancel(scene, number, namespace=f"space-{number % 50}", labels=labels)
        groups = scene.accounts.totals()
        assert len(groups) <= 1000 + 50
        assert sum(sum(totals.ended.values()) for totals in groups.values()) == 0, "no status says so yet"
        document = scene.api.objects["ConfigMap", "system", "tuning-accounts"]
        assert len(document["binaryData"][KEY]) < 500_000

    run(scenario)


def test_content_that_unpacks_to_too_much_is_not_read() -> None:
    packed = base64.b64encode(zlib.compress(b" " * (65 << 20) + b"{}")).decode()
    with pytest.raises(ValueError, match="JSON"):
        read_ledger({"binaryData": {KEY: packed}})


def test_what_was_kept_stays_when_the_record_is_removed() -> None:
    async def scenario(scene: Scene) -> None:
        stored = {"metadata": {"name": "tuning-accounts", "namespace": "system"}, "binaryData": {UNREADABLE: "bG9zdA=="}}
        scene.api.put(CONFIG_MAPS, stored)
        await scene.count_until(60)
        data = scene.api.objects["ConfigMap", "system", "tuning-accounts"]["binaryData"]
        assert (data[UNREADABLE], KEY in data) == ("bG9zdA==", True)

    run(scenario)


@pytest.mark.parametrize(("length", "is_kept"), [(400_000, True), (400_004, False)])
def test_what_cannot_be_read_is_kept_for_people(length: int, is_kept: bool) -> None:
    """Also by the next writes, and by the next life of the operator."""
    lost = "A" * length

    async def scenario(scene: Scene) -> None:
        stored = {"metadata": {"name": "tuning-accounts", "namespace": "system"}, "binaryData": {KEY: lost}}
        scene.api.put(CONFIG_MAPS, stored)
        for until in (60, 120):
            await scene.count_until(until)
            data = scene.api.objects["ConfigMap", "system", "tuning-accounts"]["binaryData"]
            assert data.get(UNREADABLE) == (lost if is_kept else None)
            assert data[KEY] != lost
            scene.accounts = scene.another_life()

    run(scenario)
