"""The plan of a job on this machine."""

from __future__ import annotations

import pytest

from finetune_cli.commands.run import local_plan
from finetune_cli.exit_codes import ExitCode, LocalError
from tests.unit.finetune_cli.jobs import PLAN, job, published


def test_the_plan_of_this_machine():
    assert PLAN.workspace.path == "tuned-local"
    assert PLAN.placement is None
    assert local_plan(job(), own_output=True).output.claim == "output-directory"
    assert local_plan(published(), own_output=True).publish is None
    with pytest.raises(LocalError, match=r"spec.parallelism.nodes: 2 .*processesPerNode") as caught:
        local_plan(job(nodes=2), own_output=False)
    assert caught.value.exit_code is ExitCode.REFUSED
