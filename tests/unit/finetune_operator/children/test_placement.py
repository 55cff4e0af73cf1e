"""Where pods run and which queue admits them: from the profile and the job, through the frozen plan, into Jobs and pods."""

from typing import Any

import pytest

from finetune_job.names import Role
from finetune_job.plan.digest import canonical_json
from finetune_job.plan.launch_plan import read_launch_plan
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.train_job import gang_service, gated_train_job, train_job
from tests.support.builders import JobBuilder, a_job
from tests.support.cases import table
from tests.unit.finetune_operator.children.building import OWNER, job_of, pod_spec

CPU_ROLES = [Role.FETCH, Role.PREFLIGHT, Role.MERGE, Role.PUBLISH]
TAINTED: dict[str, Any] = table(__file__, "TAINTED")


def run_of(job: JobBuilder) -> FrozenRun:
    """As the operator has it: read back from the text in the ConfigMap."""
    plan = read_launch_plan(canonical_json(job.plan()))
    return FrozenRun(OWNER, plan, plan.placement, "0" * 64)


def test_a_tainted_node_with_special_devices_is_reached() -> None:
    job = train_job(run_of(a_job().processes_per_node(8).with_profile(pods={"train": TAINTED})), 0)
    pod, (container,) = pod_spec(job), pod_spec(job)["containers"]
    assert pod["nodeSelector"] == {"accelerator": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "reserved", "operator": "Equal", "value": "training", "effect": "NoExecute", "tolerationSeconds": 60},
    ]
    assert pod["affinity"] == TAINTED["affinity"]
    assert (pod["schedulerName"], pod["priorityClassName"], pod["runtimeClassName"]) == ("volcano", "research", "nvidia")
    assert pod["resourceClaims"] == [{"name": "imex", "resourceClaimTemplateName": "imex-channel"}]
    amounts = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8", "rdma/hca": "1"}
    assert container["resources"] == {"requests": amounts, "limits": amounts, "claims": [{"name": "imex"}]}
    assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in container["env"]
    template = job["spec"]["template"]["metadata"]
    assert template["annotations"] == TAINTED["annotations"]
    assert template["labels"]["scheduling.x-k8s.io/pod-group"] == "ours"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "nightly"


@pytest.mark.parametrize("role", CPU_ROLES)
def test_what_is_said_of_training_concerns_no_other_role(role: Role) -> None:
    plain = job_of(role, run_of(a_job()))
    beside = job_of(role, run_of(a_job().run(queueName="gpus").with_profile(pods={"train": TAINTED})))
    assert beside == plain


@pytest.mark.parametrize("role", CPU_ROLES)
def test_cpu_roles_share_their_settings_until_one_has_its_own(role: Role) -> None:
    pods = {"cpu": {"queueName": "cpus", "nodeSelector": {"pool": "cpu"}}, str(role): {"queueName": "own"}}
    jobs = {one: job_of(one, run_of(a_job().with_profile(pods=pods))) for one in Role}
    for one, job in jobs.items():
        queue = job["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        assert queue == {Role.TRAIN: None, role: "own"}.get(one, "cpus")
        selected = pod_spec(job).get("nodeSelector")
        assert selected == (None if one in (Role.TRAIN, role) else {"pool": "cpu"})


def test_training_pods_need_the_profiles_nodes_and_those_of_their_own_settings() -> None:
    profile = {"nodeSelector": {"gpu": "h100", "zone": "a"}, "pods": {"train": {"nodeSelector": {"zone": "b"}}}}
    assert pod_spec(train_job(run_of(a_job().with_profile(**profile)), 0))["nodeSelector"] == {"gpu": "h100", "zone": "b"}


def queue_and_priorities(job: JobBuilder) -> tuple[str | None, str | None, str | None]:
    """Queue and its priority class of the training Job, and the PriorityClass of its pods."""
    body = train_job(run_of(job), 0)
    labels = body["metadata"]["labels"]
    queue, priority = labels.get("kueue.x-k8s.io/queue-name"), labels.get("kueue.x-k8s.io/priority-class")
    return queue, priority, pod_spec(body).get("priorityClassName")


def test_the_jobs_queue_and_priority_come_before_the_profiles() -> None:
    job, queued = a_job(), {"train": {"queueName": "gpus", "queuePriorityClassName": "nightly", "priorityClassName": "research"}}
    assert queue_and_priorities(job) == (None, None, None)
    assert queue_and_priorities(job.run(queueName="mine")) == ("mine", None, None)
    assert queue_and_priorities(job.run(priorityClassName="high")) == (None, None, "high")
    assert queue_and_priorities(job.run(queueName="mine", priorityClassName="high")) == ("mine", "high", None)
    assert queue_and_priorities(job.with_profile(pods=queued)) == ("gpus", "nightly", "research")
    mine = job.run(queueName="mine", priorityClassName="high").with_profile(pods=queued)
    assert queue_and_priorities(mine) == ("mine", "high", "research")


def test_without_a_queue_there_is_no_label_of_one() -> None:
    job = a_job().with_profile(pods={"train": {"queuePriorityClassName": "nightly"}})
    assert queue_and_priorities(job) == (None, None, None)


def test_the_image_is_pulled_with_the_profiles_secrets_and_no_container_sees_them() -> None:
    run = run_of(a_job().with_profile(imagePullSecrets=[{"name": "registry"}]))
    for role in Role:
        pod = pod_spec(job_of(role, run))
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert "registry" not in str(pod["containers"][0]["volumeMounts"])


@pytest.mark.parametrize("role", Role)
def test_pods_are_found_by_labels_that_no_placement_changes(role: Role) -> None:
    key = "train" if role is Role.TRAIN else "cpu"
    run = run_of(a_job().with_profile(pods={key: {"labels": {"team": "a"}}}))
    labels = job_of(role, run)["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "a"
    assert (gang_service(OWNER)["spec"]["selector"].items() <= labels.items()) is (role is Role.TRAIN)


def test_a_placement_that_forges_our_labels_is_overruled() -> None:
    """The profile refuses them; a plan of some other release may not have."""
    run = run_of(a_job())
    forged = run.placement.model_copy(
        update={
            "pods": run.placement.pods.model_copy(
                update={"train": run.placement.pods.train.model_copy(update={"labels": {"finetune.dev/role": "merge"}})}
            )
        }
    )
    job = train_job(FrozenRun(OWNER, run.plan, forged, "0" * 64), 0)
    assert job["spec"]["template"]["metadata"]["labels"]["finetune.dev/role"] == "train"


def test_a_placement_that_sets_amounts_of_ours_is_overruled() -> None:
    """The profile refuses these, too."""
    run = run_of(a_job().processes_per_node(8).with_profile(pods={"train": TAINTED}))
    extra = {"extra_resources": {"cpu": "1", "nvidia.com/gpu": "1", "rdma/hca": "1"}}
    train = run.placement.pods.train.model_copy(update=extra)
    forged = run.placement.model_copy(update={"pods": run.placement.pods.model_copy(update={"train": train})})
    job = train_job(FrozenRun(OWNER, run.plan, forged, "0" * 64), 0)
    (container,) = pod_spec(job)["containers"]
    amounts = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8", "rdma/hca": "1"}
    assert (container["resources"]["requests"], container["resources"]["limits"]) == (amounts, amounts)


def test_a_plan_that_asks_for_nothing_new_is_written_as_before() -> None:
    """So that trainer images of the releases before read it: they refuse fields that they do not know."""
    for new in ("pods", "image_pull_secrets"):
        assert new not in canonical_json(a_job().plan())
    asked = a_job().run(queueName="gpus").plan().placement
    assert asked.model_dump(mode="json")["pods"] == {"train": {"queue_name": "gpus"}}


def test_gated_training_is_the_same_job_held_back() -> None:
    run = run_of(a_job().with_profile(pods={"train": {"queueName": "gpus"}}))
    gated = gated_train_job(run, 0)
    assert gated["metadata"]["annotations"].pop("kueue.x-k8s.io/admission-gated-by") == "finetune.dev/preflight"
    assert gated["spec"].pop("suspend") is True
    assert gated == train_job(run, 0)
