"""Manifests that hypothesis draws from the definition's schema: like those of test_manifests.py, but a failing one shrinks.

The same in every CI run; `make explore` draws new ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile.strategies import jobs
from tests.hostile.test_manifests import DRAWN, MOST_MEMORY_BYTES, PROFILES, Bounded, one_object, peak_bytes


def test_drawn_objects_are_refused_with_reasons_or_accepted_and_planned() -> None:
    outcomes, before = Counter[str](), peak_bytes()

    @settings(max_examples=DRAWN, suppress_health_check=list(HealthCheck))
    @given(jobs(), st.integers(0, 2), st.integers(0, 19))
    def each(document: dict[str, Any], profile: int, one_in_twenty: int) -> None:
        with Bounded(document):
            outcomes[one_object(document, PROFILES[profile], is_fixed=one_in_twenty == 0)] += 1

    each()
    assert peak_bytes() - before < MOST_MEMORY_BYTES
    assert outcomes.total() >= DRAWN
    assert min(outcomes[kind] for kind in ("unreadable", "refused", "accepted")) > DRAWN / 20, outcomes
