"""The API server refuses one kind of request for good: what does not need it goes on, and users learn of it."""

from __future__ import annotations

import random

from finetune_operator.client.kinds import CLAIMS, JOBS, SERVICES
from tests.simulation.api_server import Document, RefusedError
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest

DENIED = RefusedError(400, "BadRequest", 'admission webhook "policy.example" denied the request: no')
OVERLOADED = RefusedError(500, "InternalError", "etcdserver: mvcc: database space exceeded")


def a_world(manifest: Document) -> World:
    world = World(VirtualLoop(), random.Random("refused"))
    world.people_prepare([manifest], {})
    world.start_operator()
    return world


def the_job(world: World) -> Document:
    (job,) = world.server.all(JOBS)
    return job


def ready(world: World) -> Document:
    return next(one for one in the_job(world)["status"]["conditions"] if one["type"] == "Ready")


def test_a_job_on_which_no_pass_can_work_says_so_once_and_continues_once_it_can() -> None:
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


def test_an_operator_that_starts_again_reports_again_and_writes_little() -> None:
    world = a_world(a_manifest(TEAM, "tune"))

    async def live() -> None:
        await world.rest(2, succeed=False)
        world.server.refuses = lambda method, kind, _: DENIED if (method, kind) == ("GET", CLAIMS) else None
        for _ in range(3):
            await world.rest(10, succeed=True)
            assert ready(world)["reason"] == "OperatorError"
            world.operator.kill()
        (life,) = world.invariants.lives.values()
        assert len(life.status_writes) <= 12

    run(live(), world.loop)
