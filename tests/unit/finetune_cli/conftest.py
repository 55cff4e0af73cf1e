"""What holds for every test of the command line."""

import pytest


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """The Hub is asked for commits, which would make the answers depend on the network; tests of that have a hub of their own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
