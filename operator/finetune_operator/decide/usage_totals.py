"""Sums and histograms over the accounts of all jobs with the same labels, for the counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from finetune_operator.decide.account import Confirmed, JobAccount, added, with_told_restarts

SECONDS_BOUNDS = (1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 86_400, 259_200)
"""Upper bounds of the buckets of durations: from a job that finds everything ready to one that trains for days."""
NUM_BUCKETS = len(SECONDS_BOUNDS) + 1


class DurationCounts(BaseModel):
    """A histogram of seconds."""

    model_config = ConfigDict(frozen=True)
    counts: Annotated[tuple[int, ...], Field(min_length=NUM_BUCKETS, max_length=NUM_BUCKETS)] = (0,) * NUM_BUCKETS
    """Number of durations in each bucket; the last one is for those above all bounds."""
    total: FiniteFloat = 0.0

    def plus(self, seconds: float) -> DurationCounts:
        """Return the histogram with one more duration."""
        place = bisect_left(SECONDS_BOUNDS, seconds)
        counts = tuple(count + (number == place) for number, count in enumerate(self.counts))
        return DurationCounts(counts=counts, total=self.total + seconds)


class UsageTotals(BaseModel):
    """Usage and results of all jobs with the same labels."""

    model_config = ConfigDict(frozen=True)
    gpu_seconds: Mapping[str, FiniteFloat] = Field(default_factory=dict)
    restarts: Mapping[str, int] = Field(default_factory=dict)
    ended: Mapping[str, int] = Field(default_factory=dict)
    """`result|reason` -> jobs."""
    durations: Mapping[str, DurationCounts] = Field(default_factory=dict)
    """A histogram for each phase."""

    def plus(self, account: JobAccount, confirmed: Confirmed) -> UsageTotals:
        """Return the totals with what is confirmed of an account."""
        account = with_told_restarts(account, confirmed)
        ended, durations = dict(self.ended), dict(self.durations)
        if account.ended is not None and confirmed.has_ended:
            ended = added(ended, {f"{account.ended.result}|{account.ended.reason}": 1})
            for phase, seconds in account.ended.seconds.items():
                durations[phase] = durations.get(phase, DurationCounts()).plus(seconds)
        return UsageTotals(
            gpu_seconds=added(self.gpu_seconds, account.gpu_seconds),
            restarts=added(self.restarts, account.restarts),
            ended=ended,
            durations=durations,
        )
