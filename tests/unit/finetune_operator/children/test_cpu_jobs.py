"""The Jobs of a single CPU pod."""

from __future__ import annotations

import pytest

from finetune_job.names import Role
from tests.support.builders import a_job
from tests.unit.finetune_operator.children.building import BUILDERS, pod_spec, run_of


@pytest.mark.parametrize("role", [Role.FETCH, Role.PREFLIGHT, Role.MERGE, Role.PUBLISH])
def test_the_arguments_of_a_cpu_pod(role: Role) -> None:
    run = run_of(a_job())
    arguments = pod_spec(BUILDERS[role](run, 1))["containers"][0]["args"]
    assert arguments == [str(role), "--plan", "/plan/plan.json", "--plan-sha256", run.plan_sha256, "--attempt", "1"]


@pytest.mark.parametrize("role", [Role.FETCH, Role.PREFLIGHT, Role.MERGE, Role.PUBLISH])
def test_a_cpu_job_is_one_pod_that_nobody_replaces(role: Role) -> None:
    body = BUILDERS[role](run_of(a_job().nodes(4)), 0)
    assert body["metadata"]["name"] == f"tune-{role}-0"
    assert (body["spec"]["completions"], body["spec"]["parallelism"], body["spec"]["backoffLimit"]) == (1, 1, 0)
    assert pod_spec(body)["restartPolicy"] == "Never"
    assert pod_spec(body)["terminationGracePeriodSeconds"] == 30
