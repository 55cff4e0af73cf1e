"""What refusals claim: which of them say that a run fails, and how; and which are refusals on principle. The tables are YAML.

The judge compares a claim with what was observed. A refusal on principle is never judged to be false, whatever happens: what is
wrong shows in no run, or in none that the sweep can compare. Each has its reason in the table, or in the reproduction of its
rule, which tells what goes wrong in silence. Other tests show on the real libraries that it does: tests/unit/sweep/test_policy.py
demands of each such refusal a test that does, or its own word that there is none.
"""

from tests.support.cases import table

POLICY: dict[str, str] = table(__file__, "POLICY")
POLICY_MESSAGES: dict[str, str] = table(__file__, "POLICY_MESSAGES")
SEEN: dict[str, str] = table(__file__, "SEEN")
ABOUT_ADDED_ROWS = frozenset[str](table(__file__, "ABOUT_ADDED_ROWS"))
GROWS: list[str] = table(__file__, "GROWS")
UNSEEN: dict[str, str] = table(__file__, "UNSEEN")
CLAIMS: dict[str, str] = table(__file__, "CLAIMS")
