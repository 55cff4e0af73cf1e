"""A rank and what ranks agree on; several ranks are tested where they train."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from finetune_trainer.ranks.gang import collective_timeout, joined, launched_rank
from finetune_trainer.ranks.stalls import stall_timeouts


def test_a_gang_of_one_needs_no_messages() -> None:
    with joined(0, 1, 0) as gang:
        assert gang.is_first
        assert gang.messages is None
        assert gang.gather("a") == ["a"]
        assert gang.from_first({"b": 1}) == {"b": 1}
        assert gang.sum([1.5, 2.0]) == [1.5, 2.0]
        gang.barrier()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("step_timeout", [1.0, 600.0, 7200.0])
def test_collectives_wait_until_the_watchdog_has_had_its_say(step_timeout: float) -> None:
    verdict = timedelta(seconds=stall_timeouts(step_timeout).verdict)
    assert collective_timeout(step_timeout) == verdict + timedelta(minutes=1)


def test_the_rank_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == (5, 8, 1)
