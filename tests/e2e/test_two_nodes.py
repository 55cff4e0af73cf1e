"""Of the failures that `make failures` plays, the one that tells most about nodes: one of them loses its power."""

import pytest

from tests.e2e.failures import node_faults
from tests.e2e.failures.case import Case
from tests.e2e.failures.scene import Scene
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
CHOSEN = ("power-cut-declared",)
CASES = [case for case in node_faults.CASES if case.name in CHOSEN]


def test_the_chosen_cases_exist() -> None:
    assert {case.name for case in CASES} == set(CHOSEN)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_comes_out_as_expected(stack: Stack, case: Case) -> None:
    scene = Scene(stack, case.name)
    try:
        case.play(scene)
        assert scene.finish().differences(case.expected) == []
    finally:
        scene.leave()
