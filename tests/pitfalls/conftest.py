"""The mark `reproduces`, by which a test of this folder says which rules of the book it shows on the real libraries.

`@pytest.mark.reproduces("rule-id", ...)` names the rules. Without arguments it stands for all rules that the table of the test's
parameter `rule` holds. The rule names the test in turn; tests/unit/finetune_job/rules/test_reproductions.py compares both.
"""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "reproduces(*rules): shows on the real libraries what these rules are about")
