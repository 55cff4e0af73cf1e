"""Verdict against observation: do the gates say what really happens?"""

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from finetune_job.rules.book import rule_by_id
from tests.sweep.explanations import CLAIMS, GROWS, POLICY, POLICY_MESSAGES, SEEN, UNSEEN
from tests.sweep.observation import Observation, Verdict

Kind = Literal["accepted", "refused", "policy", "false accept", "false refusal", "unexplained"]
"""The first three are right: works and accepted; fails as the refusal says; refused on a principle that POLICY names."""
SHARED_PHRASE = 24
"""Characters in a row that a finding and an error have in common where one speaks of the other."""
WRONG: tuple[Kind, ...] = ("false accept", "false refusal", "unexplained")


@dataclass(frozen=True)
class Judgement:
    """One case."""

    kind: Kind
    why: str


def judged(verdict: Verdict | None, observation: Observation, ranks: int) -> Judgement:
    """`verdict`: None where the gates did not answer."""
    if verdict is None:
        return Judgement("unexplained", "the gates gave no answer")
    if verdict.crashed:
        return Judgement("unexplained", f"a gate crashed: {verdict.crashed}")
    works, text = observation.outcome == "works", observation.text()
    if verdict.schema_error:
        return Judgement("refused", "the schema has no such value, so there is nothing to run")
    if not verdict.refused:
        return Judgement("accepted", text) if works else Judgement("false accept", text)
    claims = [identifier for identifier in verdict.ids if not _is_principle(identifier, verdict, ranks)]
    if works:
        if seen := to_be_seen(verdict, ranks):
            return Judgement("false refusal", f"works, but is refused by {', '.join(seen)}")
        return Judgement("policy", ", ".join(verdict.ids))
    explaining = [identifier for identifier in claims if explains(identifier, text, verdict.messages.get(identifier, ""))]
    if explaining:
        return Judgement("refused", f"{', '.join(explaining)}: {text}")
    if len(claims) < len(verdict.ids):
        return Judgement("policy", ", ".join(verdict.ids))
    return Judgement("unexplained", f"{text}; refused by {', '.join(verdict.ids)}")


def to_be_seen(verdict: Verdict, ranks: int) -> list[str]:
    """Ids of refusals whose reason would show in a run."""
    return [
        identifier for identifier in verdict.ids if identifier not in UNSEEN and not _is_principle(identifier, verdict, ranks)
    ]


def _is_principle(identifier: str, verdict: Verdict, ranks: int) -> bool:
    pattern = POLICY_MESSAGES.get(identifier)
    says_so = pattern is not None and re.search(pattern, verdict.messages.get(identifier, "")) is not None
    # What is sharded from two ranks on is refused on one rank, too, so that a job which was tried there can grow.
    shown = f"{identifier}: {verdict.messages.get(identifier, '')}"
    grows = ranks == 1 and any(re.search(pattern, shown) for pattern in GROWS)
    return is_never_false(identifier) or says_so or grows


def is_never_false(identifier: str) -> bool:
    """Whether no run can show that this refusal is a mistake: what it refuses goes wrong in silence."""
    if identifier in SEEN:
        return False
    known = rule_by_id(identifier)
    # The test of its reproduction shows what happens in silence.
    is_silent = known is not None and known.observed.startswith("no error")
    return is_silent or identifier in POLICY


def explains(identifier: str, text: str, said: str = "") -> bool:
    """Whether what happened is what this rule or finding says: by CLAIMS, or because it quotes the very error.

    said: the finding's message.
    """
    pattern = CLAIMS.get(identifier) or SEEN.get(identifier)
    if pattern is not None and re.search(pattern, text):
        return True
    known = rule_by_id(identifier)
    observed = known.observed if known is not None else ""
    return any(_share_a_phrase(words, text) for words in (said, observed))


def _share_a_phrase(one: str, other: str) -> bool:
    match = difflib.SequenceMatcher(None, one, other, autojunk=False).find_longest_match()
    return match.size >= SHARED_PHRASE
