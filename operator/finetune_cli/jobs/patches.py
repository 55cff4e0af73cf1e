"""JSON merge patches of manifests (RFC 7396): what helps after a failure, what turns one object into another, and as `--set`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from finetune_cli.jobs import documents
from finetune_cli.jobs.seen import SeenJob
from finetune_job.api.inputs import DataSpec
from finetune_job.api.method import MethodType
from finetune_job.api.pod_settings import quantity_bytes
from finetune_job.api.training import ActivationCheckpointing, CheckpointSpec, OptimizerName, TrainingSpec
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.plan.resolve_training import USUAL_LEARNING_RATES, USUAL_SGD_LEARNING_RATE

Patch = dict[str, Any]
_MOST_TIMEOUT_SECONDS, _MOST_DEADLINE_SECONDS = 86_400, 604_800
"""The API takes no more."""
_SLOWER = 0.5
"""Factor by which a learning rate that diverged is reduced at least."""
_WRITES_TO_WORKSPACE = (Role.FETCH, Role.PREFLIGHT, Role.TRAIN)
_SHORTEST_SEQUENCE = 256
"""Tokens; below it few records would be left."""


def patch_for(failure: FailureClass, job: SeenJob, role: str) -> Patch | None:
    """Settings to change in a new job after such a failure of a role; None if no setting can help.

    The result of training is the same with the changes for memory and disk, but for a shorter sequence, beyond which records are
    dropped. That and a lower learning rate are proposals.
    """
    match failure:
        case FailureClass.DEVICE_OUT_OF_MEMORY:
            return _less_memory(job)
        case FailureClass.HOST_OUT_OF_MEMORY if role == Role.TRAIN:
            if _effective(job, "asynchronous", "checkpoint") is True:
                return {"spec": {"checkpoint": {"asynchronous": False}}}
            # With GPUs, activations are in the memory of the device.
            return _less_memory(job) if job.is_on_cpu else None
        case FailureClass.NON_FINITE:
            return _lower_rate(job)
        case FailureClass.STALLED:
            return _longer_waits(job)
        case FailureClass.DISK_FULL if role in _WRITES_TO_WORKSPACE:
            return _less_disk(job, role)
        case FailureClass.PREEMPTED | FailureClass.INFRASTRUCTURE | FailureClass.NODE_LOST if role == Role.TRAIN:
            # It was given up because no checkpoint was written between two losses.
            if documents.value(job.spec, "checkpoint", "adaptive") is not True:
                return {"spec": {"checkpoint": {"adaptive": True}}}
    return None


NO_PATCH: Mapping[FailureClass, str] = {
    FailureClass.USER_CONFIG: "Which setting to change only the message says: no change is right for every such failure.",
    FailureClass.USER_DATA: "No setting makes wrong data right: correct the records, or name others.",
    FailureClass.USER_MODEL: "No setting makes a wrong model right: correct its files, or name another.",
    FailureClass.NON_FINITE: "No lower learning rate can be proposed, because the job's own is not known.",
    FailureClass.DEVICE_OUT_OF_MEMORY: "No setting takes less memory: use a profile with larger devices, or more nodes.",
    FailureClass.DEVICE_FAULT: "No setting repairs a device: a node that is cordoned is not used again.",
    FailureClass.HOST_OUT_OF_MEMORY: "No setting of the job takes less of this pod's memory, which its profile gives it.",
    FailureClass.DISK_FULL: "No setting writes less: enlarge the claim, or make room on it.",
    FailureClass.COLLECTIVE: "No setting repairs the network, and most often another rank failed first: its log says why.",
    FailureClass.STALLED: "The ranks have the longest time already that may be set: their stacks say where they wait.",
    FailureClass.SOURCE_UNAVAILABLE: "No setting has a source answer.",
    FailureClass.DESTINATION_REFUSED: "Whether the destination, its Secret or what it holds is to change only its answer says.",
    FailureClass.DESTINATION_UNAVAILABLE: "No setting has a destination answer.",
    FailureClass.CHECKPOINT_INVALID: "No setting makes a checkpoint whole: a new job begins without one, from the base model.",
    FailureClass.PLAN_MISMATCH: "The spec is not at fault: a new job gets a plan of its own.",
    FailureClass.VERIFICATION_FAILED: "No setting makes a merged model right: verification.json says what differs, and the "
    "adapter is kept.",
    FailureClass.PREEMPTED: "Nothing is wrong with the job.",
    FailureClass.INFRASTRUCTURE: "No setting keeps a pod on a node.",
    FailureClass.NODE_LOST: "No setting brings a node back.",
    FailureClass.REJECTED: "No setting makes room on a node.",
    FailureClass.IMAGE_PULL: "The image is the profile's, and no setting changes it.",
    FailureClass.MOUNT: "No setting makes what is missing: create it; only a name that is wrong is corrected in a new job.",
    FailureClass.ADMISSION: "The pods are made as their profile says, which no setting of the job changes.",
    FailureClass.INTERNAL: "Nothing is known of which setting could help: the exception and the log say what happened.",
    FailureClass.UNKNOWN: "Nothing is known of what happened, so no change can be proposed.",
}
"""Why no change of the manifest is proposed, if `patch_for` has none."""


def _less_memory(job: SeenJob) -> Patch | None:
    """Settings with which a rank needs less memory, the cheapest change first."""
    micro = _effective(job, "microBatchSize")
    if isinstance(micro, int) and micro > 1:
        return {"spec": {"training": {"microBatchSize": micro // 2 if micro % 2 == 0 else 1}}}
    if _effective(job, "activationCheckpointing") != ActivationCheckpointing.FULL:
        return {"spec": {"training": {"activationCheckpointing": ActivationCheckpointing.FULL.value}}}
    length = documents.number(job.spec, "data", "maxSequenceLength") or DataSpec().max_sequence_length
    return {"spec": {"data": {"maxSequenceLength": length // 2}}} if length >= 2 * _SHORTEST_SEQUENCE else None


def _lower_rate(job: SeenJob) -> Patch | None:
    """Half of the rate, or the usual one if that is lower still: what is far too high diverges with half of it as well."""
    rate = _effective(job, "learningRate")
    number = documents.decimal(rate) if isinstance(rate, str) else None
    if number is None or number <= 0:
        return None
    is_full = documents.text(job.spec, "method", "type") == MethodType.FULL
    is_sgd = documents.text(job.spec, "training", "optimizer") == OptimizerName.SGD
    usual = float(USUAL_SGD_LEARNING_RATE if is_sgd else USUAL_LEARNING_RATES[is_full])
    return {"spec": {"training": {"learningRate": f"{min(number * _SLOWER, usual):.6g}"}}}


def _longer_waits(job: SeenJob) -> Patch | None:
    """Longer deadlines of both that detect a stall: the ranks' watchdog and, if it is set, the operator's."""
    seconds = documents.number(job.spec, "training", "stepTimeoutSeconds") or TrainingSpec().step_timeout_seconds
    deadline = documents.number(job.spec, "run", "stallDeadlineSeconds")
    patch: Patch = {}
    if (longer := min(2 * seconds, _MOST_TIMEOUT_SECONDS)) > seconds:
        patch["training"] = {"stepTimeoutSeconds": longer}
    if deadline is not None and (later := min(2 * deadline, _MOST_DEADLINE_SECONDS)) > deadline:
        patch["run"] = {"stallDeadlineSeconds": later}
    return {"spec": patch} if patch else None


def _less_disk(job: SeenJob, role: str) -> Patch | None:
    keep, least = documents.number(job.spec, "checkpoint", "keep"), CheckpointSpec().keep
    if role == Role.TRAIN and keep is not None and keep > least:
        return {"spec": {"checkpoint": {"keep": least}}}
    try:
        size = quantity_bytes(documents.text(job.spec, "workspace", "volumeClaimTemplate", "storage"))
    except ValueError:
        return None
    return {"spec": {"workspace": {"volumeClaimTemplate": {"storage": f"{-(-2 * size // 2**30)}Gi"}}}} if size else None


def _effective(job: SeenJob, setting: str, part: str = "training") -> object:
    """A setting of a part of the spec as the manifest or, if it leaves it open, the plan has it."""
    written = documents.value(job.spec, part, setting)
    if written is not None or job.status.plan is None:
        return written
    for choice in job.status.plan.choices:
        if choice.field == f"spec.{part}.{setting}":
            try:
                return json.loads(choice.value)
            except (ValueError, RecursionError):
                return None
    return None


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Patch:
    """The JSON merge patch (RFC 7396) from one object to the other; empty if they are the same."""
    patch: Patch = {key: None for key in before if key not in after}
    for key, value in after.items():
        earlier = before.get(key)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            inner = merge_patch(earlier, value)
            if inner:
                patch[key] = inner
        # Compared as text: true is not 1.
        elif key not in before or json.dumps(earlier) != json.dumps(value):
            patch[key] = value
    return patch


def assignments(patch: Mapping[str, Any], path: str) -> Iterable[str]:
    """A patch as `fork --set` takes it: texts as they are, other values as JSON, nothing for a field that goes."""
    for key, value in patch.items():
        place = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from assignments(value, f"{place}.")
        else:
            yield f"{place}=" + ("" if value is None else value if isinstance(value, str) else json.dumps(value))
