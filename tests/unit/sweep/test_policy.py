"""What the sweep knows of refusals names refusals that exist."""

import re

import pytest

from finetune_job.catalogue.book import entries
from finetune_job.rules.book import RULES, rule_by_id
from tests.sweep.explanations import CLAIMS, POLICY, POLICY_MESSAGES, SEEN, UNSEEN
from tests.sweep.judge import is_never_false, judged
from tests.sweep.observation import Observation, Verdict

NEVER_FALSE = sorted({rule.id for rule in RULES if rule.severity == "error" and is_never_false(rule.id)} | set(POLICY))
"""Refusals that the sweep cannot call false, so that something else has to show them."""


@pytest.mark.parametrize("identifier", [*POLICY, *POLICY_MESSAGES, *CLAIMS, *SEEN, *UNSEEN])
def test_every_refusal_that_the_sweep_speaks_of_exists(identifier: str) -> None:
    assert rule_by_id(identifier) is not None or entries().get(identifier) is not None


def shown_by(identifier: str) -> list[str]:
    """The tests that show what such settings do, by the refusal's entry in the rule book or the catalogue."""
    known, entry = rule_by_id(identifier), entries().get(identifier)
    named = known.test if known is not None and known.test else entry.reproduction if entry else ""
    return named.split()


@pytest.mark.parametrize("identifier", NEVER_FALSE)
def test_what_no_run_of_the_sweep_can_call_false_is_shown_by_a_test_of_its_own(identifier: str) -> None:
    # tests/unit/finetune_job asserts that the named tests exist and are about the refusal.
    assert shown_by(identifier), "name the test that shows it on the real libraries, or take it out of POLICY"


def test_of_half_of_the_rules_a_false_refusal_can_be_seen() -> None:
    """The share is told and not hidden: a rule whose reproduction says "no error" is never judged false."""
    errors = [rule.id for rule in RULES if rule.severity == "error"]
    judged_by_runs = [identifier for identifier in errors if not is_never_false(identifier)]
    assert len(judged_by_runs) >= len(errors) // 2 - 5, f"{len(judged_by_runs)} of {len(errors)}"


def test_no_refusal_is_a_principle_and_a_claim() -> None:
    assert set(POLICY) & set(CLAIMS) == set()


@pytest.mark.parametrize("pattern", [*CLAIMS.values(), *POLICY_MESSAGES.values(), *SEEN.values()])
def test_patterns_are_regular_expressions(pattern: str) -> None:
    re.compile(pattern)
    assert not re.search(pattern, "works")


@pytest.mark.parametrize("identifier", UNSEEN)
def test_what_bounds_cannot_see_explains_no_failure(identifier: str) -> None:
    verdict = Verdict(preflight=(identifier,), messages={identifier: "said"})
    assert judged(verdict, Observation(), 2).kind == "policy"
    assert judged(verdict, Observation(problems=("fails as nobody says",)), 2).kind == "unexplained"
