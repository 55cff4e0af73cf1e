"""What the sweep knows of refusals names refusals that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import finetune_trainer.preflight
from finetune_job.rules.book import rule_by_id
from tests.sweep.explanations import CLAIMS, POLICY, POLICY_MESSAGES, UNSEEN
from tests.sweep.judge import judged
from tests.sweep.observation import Observation, Verdict

PREFLIGHT = "\n".join(path.read_text() for path in Path(finetune_trainer.preflight.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("identifier", [*POLICY, *POLICY_MESSAGES, *CLAIMS, *UNSEEN])
def test_every_refusal_that_the_sweep_speaks_of_exists(identifier: str) -> None:
    assert rule_by_id(identifier) is not None or f'"{identifier}"' in PREFLIGHT


def test_no_refusal_is_a_principle_and_a_claim() -> None:
    assert set(POLICY) & set(CLAIMS) == set()


@pytest.mark.parametrize("pattern", [*CLAIMS.values(), *POLICY_MESSAGES.values()])
def test_patterns_are_regular_expressions(pattern: str) -> None:
    re.compile(pattern)
    assert not re.search(pattern, "works")


@pytest.mark.parametrize("identifier", UNSEEN)
def test_what_bounds_cannot_see_explains_no_failure(identifier: str) -> None:
    verdict = Verdict(preflight=(identifier,), messages={identifier: "said"})
    assert judged(verdict, Observation(), 2).kind == "policy"
    assert judged(verdict, Observation(problems=("fails as nobody says",)), 2).kind == "unexplained"
