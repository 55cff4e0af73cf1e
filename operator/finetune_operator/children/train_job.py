"""The gang: the Indexed Job of one attempt, and the headless Service that gives its pods DNS names. The pods of a gang start
and end together: a single replaced pod could not rejoin the others.
"""

from __future__ import annotations

from typing import Any

from finetune_job.failures import EXIT_CODES, PROCESS_FAILURES
from finetune_job.names import (
    ATTEMPT_FILE,
    ATTEMPT_MOUNT,
    LABEL_ATTEMPT,
    OBSERVE_PORT,
    RENDEZVOUS_PORT,
    TRAIN_GRACE_PERIOD_SECONDS,
    Role,
    batch_job_name,
    master_address,
    service_name,
)
from finetune_operator.children.frozen_run import FrozenRun, Owner, labels, metadata
from finetune_operator.children.placement import GATES_ANNOTATION, PREFLIGHT_GATE, queue_labels
from finetune_operator.children.pod_template import (
    DISRUPTION_FAILS_THE_JOB,
    INDEX_VARIABLE,
    index_variable,
    plan_arguments,
    pod_template,
)


def gated_train_job(run: FrozenRun, attempt: int, nodes: int | None = None) -> dict[str, Any]:
    """The Job of the gang for its queue, which must not admit it before the gate of preflight is removed.

    It is suspended from the beginning: if no queue manages it, it must not start either.
    """
    job = train_job(run, attempt, nodes)
    job["metadata"]["annotations"][GATES_ANNOTATION] = PREFLIGHT_GATE
    job["spec"]["suspend"] = True
    return job


def train_job(run: FrozenRun, attempt: int, nodes: int | None = None) -> dict[str, Any]:
    """The Job of the gang of one attempt: one pod per node, with the completion index as node rank. nodes: None for those of
    the plan.

    `suspend` is left unset, because a queue's webhook sets it. There is no deadline and no time to live, because the operator
    handles both.
    """
    # Names have room for the largest gang, so that they do not depend on the size of an attempt.
    owner, most = run.owner, run.plan.parallelism.nodes
    pods = most if nodes is None else nodes
    arguments = [
        *plan_arguments(run, Role.TRAIN, attempt),
        "--node-rank",
        f"$({INDEX_VARIABLE})",
        "--master-address",
        master_address(owner.name, owner.namespace, attempt, most),
        "--master-port",
        str(RENDEZVOUS_PORT),
        # Otherwise it is the plan's number, because trainers of earlier releases do not know this argument.
        *(["--nodes", str(pods)] if run.plan.parallelism.min_nodes is not None else []),
    ]
    template = pod_template(run, Role.TRAIN, attempt, arguments=arguments, grace_period_seconds=TRAIN_GRACE_PERIOD_SECONDS)
    template["spec"]["subdomain"] = service_name(owner.name)
    container = template["spec"]["containers"][0]
    container["env"].append(index_variable())
    if run.placement.restart_in_pod and most == 1:
        _restart_in_pod(template["spec"], container)
    container["ports"] = [
        {"name": "rendezvous", "containerPort": RENDEZVOUS_PORT, "protocol": "TCP"},
        {"name": "observe", "containerPort": OBSERVE_PORT, "protocol": "TCP"},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": DISRUPTION_FAILS_THE_JOB,
        "template": template,
    }
    name, queue = batch_job_name(owner.name, Role.TRAIN, attempt, most), queue_labels(run.placement, Role.TRAIN)
    head = metadata(owner, name, role=Role.TRAIN, attempt=attempt, plan_sha256=run.plan_sha256, queue=queue)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": head, "spec": spec}


def _restart_in_pod(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """Have the kubelet restart the container if only its processes failed.

    The container waits for its number in the file that follows the pod's label. Kubelets and API servers before 1.35 do not
    know the rule, so the pod fails there.
    """
    codes = sorted(EXIT_CODES[failure] for failure in PROCESS_FAILURES)
    container["restartPolicy"] = "Never"
    container["restartPolicyRules"] = [{"action": "Restart", "exitCodes": {"operator": "In", "values": codes}}]
    container["args"] += ["--attempt-file", f"{ATTEMPT_MOUNT}/{ATTEMPT_FILE}"]
    label = {"path": ATTEMPT_FILE, "fieldRef": {"fieldPath": f"metadata.labels['{LABEL_ATTEMPT}']"}}
    pod["volumes"].append({"name": "attempt", "downwardAPI": {"items": [label]}})
    container["volumeMounts"].append({"name": "attempt", "mountPath": ATTEMPT_MOUNT, "readOnly": True})


def gang_service(owner: Owner) -> dict[str, Any]:
    """The Service of the gang, one for all attempts.

    Addresses are published before the pods are ready: a rank becomes ready only after it has met the others.
    """
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(owner, Role.TRAIN),
        "ports": [
            {"name": "rendezvous", "port": RENDEZVOUS_PORT, "targetPort": RENDEZVOUS_PORT, "protocol": "TCP"},
            {"name": "observe", "port": OBSERVE_PORT, "targetPort": OBSERVE_PORT, "protocol": "TCP"},
        ],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(owner, service_name(owner.name)), "spec": spec}
