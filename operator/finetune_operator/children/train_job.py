"""The gang: the Indexed Job of one attempt, and the headless Service that gives its pods DNS names. The pods of a gang start
and end together: a single replaced pod could not rejoin the others.
"""

from __future__ import annotations

from typing import Any

from finetune_job.names import (
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
from finetune_operator.children.pod_template import DISRUPTION_FAILS_THE_JOB, plan_arguments, pod_template

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"


def gated_train_job(run: FrozenRun, attempt: int, nodes: int | None = None, restarts: int = 0) -> dict[str, Any]:
    """Build the gang's Job so that it already waits in its queue, which must not admit it until preflight's gate is removed.

    The Job is created suspended, so that it does not start even if no queue manages it.
    """
    job = train_job(run, attempt, nodes, restarts)
    job["metadata"]["annotations"][GATES_ANNOTATION] = PREFLIGHT_GATE
    job["spec"]["suspend"] = True
    return job


def train_job(run: FrozenRun, attempt: int, nodes: int | None = None, restarts: int = 0) -> dict[str, Any]:
    """Build the gang's Job for one attempt, with one pod per node; the completion index is the node rank.

    nodes: None for the plan's number. restarts: how often ranks may be restarted within their pod, if the gang has one pod.

    `suspend` is left unset, because a queue's webhook sets it. There is no deadline and no time to live, because the operator
    handles both.
    """
    # Names leave room for the indexes of the largest gang, so that they do not depend on the size of an attempt.
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
        # The argument is only for elastic gangs, because trainers of earlier releases do not know it.
        *(["--nodes", str(pods)] if run.plan.parallelism.min_nodes is not None else []),
        *(["--restarts", str(restarts)] if pods == 1 and restarts > 0 else []),
    ]
    template = pod_template(run, Role.TRAIN, attempt, arguments=arguments, grace_period_seconds=TRAIN_GRACE_PERIOD_SECONDS)
    template["spec"]["subdomain"] = service_name(owner.name)
    container = template["spec"]["containers"][0]
    # The Job controller would add the same variable. We declare it because `$(NAME)` in an argument is expanded only for
    # variables that are already declared, and the controller leaves a declared variable as it is.
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    container["env"].append({"name": INDEX_VARIABLE, "valueFrom": {"fieldRef": index}})
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


def gang_service(owner: Owner) -> dict[str, Any]:
    """Build the gang's headless Service, which all attempts use.

    Addresses are published before the pods are ready, because a rank becomes ready only after it has met the others.
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
