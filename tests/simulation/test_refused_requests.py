"""The API server refuses one kind of request for good: what does not need it goes on, and users learn of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from finetune_operator.cluster.kinds import CLAIMS, CONFIG_MAPS, JOBS, SERVICES, Kind
from tests.simulation.api_server import Document, RefusedError
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest

ACCOUNTS = "accounts"
DENIED = RefusedError(400, "BadRequest", 'admission webhook "policy.example" denied the request: no')
BROKEN = RefusedError(500, "InternalError", 'Internal error occurred: failed calling webhook "policy.example": no endpoints')
OVERLOADED = RefusedError(500, "InternalError", "etcdserver: mvcc: database space exceeded")


def a_world(manifest: Document) -> World:
    world = World(VirtualLoop(), random.Random("refused"))
    world.people_prepare([manifest], {})
    world.start_operator()
    return world


def the_job(world: World) -> Document:
    (job,) = world.server.all(JOBS)
    return job


def refused_writes_of_accounts(answer: RefusedError) -> Callable[[str, Kind, str], RefusedError | None]:
    def refuses(method: str, kind: Kind, name: str) -> RefusedError | None:
        return answer if (kind, name) == (CONFIG_MAPS, ACCOUNTS) and method != "GET" else None

    return refuses


def ended(world: World) -> dict[str, int]:
    """Results and reasons on record, of all labels."""
    assert world.operator is not None
    found: dict[str, int] = {}
    for totals in world.operator.accounts.totals().values():
        for result, number in totals.ended.items():
            found[result] = found.get(result, 0) + number
    return found


@pytest.mark.parametrize("answer", [DENIED, BROKEN, OVERLOADED])
def test_a_job_is_cancelled_although_its_usage_cannot_be_put_on_record(answer: RefusedError) -> None:
    world = a_world(a_manifest(TEAM, "tune"))

    async def live() -> None:
        await world.rest(3, succeed=False)
        world.server.refuses = refused_writes_of_accounts(answer)
        world.edit_run(the_job(world), cancel=True)
        # Two minutes of patience, and a pause of a minute before the next try.
        await world.rest(4, succeed=False)
        assert the_job(world)["status"]["phase"] == "Cancelled"
        assert ended(world) == {}, "nothing of it is on record"
        world.server.refuses = lambda *_: None
        await world.rest(2, succeed=False)
        assert ended(world) == {"Cancelled|Cancelled": 1}
        await world.rest(2, succeed=False)
        assert ended(world) == {"Cancelled|Cancelled": 1}

    run(live(), world.loop)


@pytest.mark.parametrize("answer", [DENIED, OVERLOADED])
def test_jobs_start_and_end_well_although_accounts_cannot_even_be_read(answer: RefusedError) -> None:
    world = World(VirtualLoop(), random.Random("unread"))
    world.server.refuses = lambda _method, kind, name: answer if (kind, name) == (CONFIG_MAPS, ACCOUNTS) else None
    world.people_prepare([a_manifest(TEAM, "tune")], {})
    world.start_operator()
    run(world.rest(30, succeed=True), world.loop)
    assert the_job(world)["status"]["phase"] == "Succeeded"


def ready(world: World) -> Document:
    return next(one for one in the_job(world)["status"]["conditions"] if one["type"] == "Ready")


def test_a_job_on_which_no_pass_can_work_says_so_once_and_goes_on_once_it_can() -> None:
    world = World(VirtualLoop(), random.Random("no right"))
    refusal = RefusedError(403, "Forbidden", 'persistentvolumeclaims "models" is forbidden: no right')
    world.server.refuses = lambda method, kind, _: refusal if (method, kind) == ("GET", CLAIMS) else None
    world.people_prepare([a_manifest(TEAM, "tune")], {})
    world.start_operator()

    async def live() -> None:
        await world.rest(1, succeed=True)
        assert "status" not in the_job(world), "less than a minute may be a server that is being replaced"
        await world.rest(60, succeed=True)
        assert (ready(world)["status"], ready(world)["reason"]) == ("False", "OperatorError")
        assert 'persistentvolumeclaims "models" is forbidden: no right' in ready(world)["message"]
        (life,) = world.invariants.lives.values()
        assert len(life.status_writes) == 1
        world.server.refuses = lambda *_: None
        await world.rest(2, succeed=False)
        assert ready(world)["reason"] != "OperatorError"
        await world.rest(20, succeed=True)
        assert the_job(world)["status"]["phase"] == "Succeeded"

    run(live(), world.loop)


def test_a_pass_that_writes_status_and_fails_after_that_does_not_take_the_message_back_each_time() -> None:
    world = a_world(a_manifest(TEAM, "tune"))

    async def live() -> None:
        world.server.refuses = lambda method, kind, _: OVERLOADED if (method, kind) == ("POST", SERVICES) else None
        await world.rest(90, succeed=True)
        assert ready(world)["reason"] == "OperatorError"
        assert OVERLOADED.message in ready(world)["message"]
        (life,) = world.invariants.lives.values()
        assert len(life.status_writes) <= 12
        world.server.refuses = lambda *_: None
        await world.rest(20, succeed=True)
        assert the_job(world)["status"]["phase"] == "Succeeded"

    run(live(), world.loop)


def test_an_operator_that_begins_anew_tells_again_and_writes_little() -> None:
    world = a_world(a_manifest(TEAM, "tune"))

    async def live() -> None:
        await world.rest(2, succeed=False)
        world.server.refuses = lambda method, kind, _: DENIED if (method, kind) == ("GET", CLAIMS) else None
        for _ in range(3):
            await world.rest(10, succeed=True)
            assert ready(world)["reason"] == "OperatorError"
            assert world.operator is not None
            world.operator.kill()
        (life,) = world.invariants.lives.values()
        assert len(life.status_writes) <= 12

    run(live(), world.loop)
