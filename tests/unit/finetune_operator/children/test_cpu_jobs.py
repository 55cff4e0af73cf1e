"""The Jobs of a single CPU pod."""

import pytest

from finetune_job.names import Role
from finetune_operator.children.cpu_jobs import cpu_job
from tests.support.builders import a_job
from tests.unit.finetune_operator.children.building import pod_spec, run_of


@pytest.mark.parametrize("role", [Role.FETCH, Role.PREFLIGHT, Role.MERGE, Role.PUBLISH])
def test_a_cpu_job_is_one_pod_that_is_never_replaced(role: Role) -> None:
    run = run_of(a_job().nodes(4))
    body = cpu_job(run, role, 1)
    pod = pod_spec(body)
    assert body["metadata"]["name"] == f"tune-{role}-1"
    assert (body["spec"]["completions"], body["spec"]["parallelism"], body["spec"]["backoffLimit"]) == (1, 1, 0)
    assert body["spec"]["podReplacementPolicy"] == "Failed"
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 30)
    arguments = pod["containers"][0]["args"]
    assert arguments == [str(role), "--plan", "/plan/plan.json", "--plan-sha256", run.plan_sha256, "--attempt", "1"]
