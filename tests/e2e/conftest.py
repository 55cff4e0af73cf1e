"""Two nodes for all end-to-end tests; what a machine cannot run is skipped with its reason."""

from collections.abc import Iterator

import pytest

from tools.cluster.requirements import unsupported_reason
from tools.stack import Stack


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    reason = unsupported_reason()
    if reason is not None:
        pytest.skip(f"no real node here: {reason}")
    with Stack(nodes=2) as running:
        yield running
        if request.session.testsfailed:
            running.cluster.keep_logs = True
            running.describe(print)
