"""When somebody looks again, and at what."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.cluster.kinds import CLAIMS
from finetune_operator.decide.actions import Actions
from finetune_operator.worker import Worker
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.test_execute import KEY, NOW, scene


def test_a_claim_that_goes_is_noticed_after_a_minute() -> None:
    async def scenario() -> None:
        stage = scene()
        stage.api.put(CLAIMS, {"metadata": objects.metadata("models", "claim-uid")})
        first = await stage.gatherer.gather(KEY, NOW)
        del stage.api.objects["PersistentVolumeClaim", "team", "models"]
        believed = await stage.gatherer.gather(KEY, NOW + timedelta(seconds=30))
        noticed = await stage.gatherer.gather(KEY, NOW + timedelta(seconds=61))
        assert first is not None
        assert believed is not None
        assert noticed is not None
        seen = ["models" in one.observed.claims for one in (first, believed, noticed)]
        assert seen == [True, True, False]

    asyncio.run(scenario())


@dataclass
class Queue:
    delays: list[float] = field(default_factory=list)

    def add_after(self, key: Any, seconds: float) -> None:
        self.delays.append(seconds)


@pytest.mark.parametrize(
    ("decided", "gathered", "expected"),
    [(100.0, 10.0, [10.0]), (10.0, 100.0, [10.0]), (None, 7.0, [7.0]), (7.0, None, [7.0]), (None, None, []), (0.0, 9.0, [0.05])],
)
def test_the_earliest_reason_to_look_again_counts(decided: float | None, gathered: float | None, expected: list[float]) -> None:
    async def scenario() -> None:
        stage = scene()
        queue: Any = Queue()
        instruments: Any = None
        worker = Worker(queue, stage.gatherer, stage.executor, instruments, lambda: NOW, instruments)
        found = replace(await stage.gathered(), revisit_after_seconds=gathered)
        worker._requeue(KEY, found, Actions(requeue_after_seconds=decided))
        assert queue.delays == expected

    asyncio.run(scenario())
