"""What every child carries, and the ConfigMap with the plan."""

import pytest

from finetune_job.names import LABEL_ROLE, PLAN_KEY, Role
from finetune_job.plan.digest import canonical_json, plan_sha256
from finetune_operator.children.frozen_run import plan_configmap
from tests.support.builders import UID, a_job
from tests.unit.finetune_operator.children.building import OWNER, job_of, run_of


@pytest.mark.parametrize("role", Role)
def test_children_belong_to_the_job_and_say_what_they_are(role: Role) -> None:
    run = run_of(a_job())
    body = job_of(role, run, 1)
    (reference,) = body["metadata"]["ownerReferences"]
    assert reference == {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "name": "tune",
        "uid": UID,
        "controller": True,
        "blockOwnerDeletion": True,  # so that a foreground deletion of the job waits for its children
    }
    labels = {"finetune.dev/job": "tune", "finetune.dev/job-uid": UID, LABEL_ROLE: str(role), "finetune.dev/attempt": "1"}
    assert labels.items() <= body["metadata"]["labels"].items()
    assert body["metadata"]["annotations"]["finetune.dev/plan-sha256"] == run.plan_sha256


def test_the_plans_config_map_holds_its_canonical_json() -> None:
    plan = a_job().plan()
    body = plan_configmap(OWNER, canonical_json(plan))
    assert body["data"] == {PLAN_KEY: canonical_json(plan)}
    assert body["metadata"]["annotations"]["finetune.dev/plan-sha256"] == plan_sha256(plan)
    assert body["immutable"] is True
