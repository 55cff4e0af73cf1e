"""Makes JSON merge patches (RFC 7396): remedies for failures, and differences of two objects; writes them as `--set` options."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
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
"""The largest values that the API accepts."""
_SLOWER = 0.5
"""Factor applied to a learning rate at which training diverged; the rate may be reduced even more."""
_WRITES_TO_WORKSPACE = (Role.FETCH, Role.PREFLIGHT, Role.TRAIN)
_SHORTEST_SEQUENCE = 256
"""Smallest maxSequenceLength that is proposed, in tokens: with a smaller one, few records would be left."""


def patch_for(failure: FailureClass, job: SeenJob, role: str) -> Patch | None:
    """Return the settings to change in a new job after this failure of a role; None if no setting can help.

    Changes for memory and disk leave the result of training as it is, except a shorter sequence, which drops longer records. A
    shorter sequence and a lower learning rate are proposals.
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
            # The job was given up because no checkpoint was written between two interruptions.
            if documents.value(job.spec, "checkpoint", "adaptive") is not True:
                return {"spec": {"checkpoint": {"adaptive": True}}}
    return None


ADVICE: Mapping[str, Mapping[str, str]] = tomllib.loads(files("finetune_cli.jobs").joinpath("advice.toml").read_text())
NO_PATCH = {FailureClass(word): reason for word, reason in ADVICE["no_patch"].items()}
"""For each failure class, why no change of the manifest is proposed if `patch_for` returns None."""


def _less_memory(job: SeenJob) -> Patch | None:
    """Return the cheapest change with which a rank needs less memory."""
    micro = _effective(job, "microBatchSize")
    if isinstance(micro, int) and micro > 1:
        return {"spec": {"training": {"microBatchSize": micro // 2 if micro % 2 == 0 else 1}}}
    if _effective(job, "activationCheckpointing") != ActivationCheckpointing.FULL:
        return {"spec": {"training": {"activationCheckpointing": ActivationCheckpointing.FULL.value}}}
    length = documents.number(job.spec, "data", "maxSequenceLength") or DataSpec().max_sequence_length
    return {"spec": {"data": {"maxSequenceLength": length // 2}}} if length >= 2 * _SHORTEST_SEQUENCE else None


def _lower_rate(job: SeenJob) -> Patch | None:
    """Propose half of the rate, or the usual rate if that is lower: half of a rate that is far too high still diverges."""
    rate = _effective(job, "learningRate")
    number = documents.decimal(rate) if isinstance(rate, str) else None
    if number is None or number <= 0:
        return None
    is_full = documents.text(job.spec, "method", "type") == MethodType.FULL
    is_sgd = documents.text(job.spec, "training", "optimizer") == OptimizerName.SGD
    usual = float(USUAL_SGD_LEARNING_RATE if is_sgd else USUAL_LEARNING_RATES[is_full])
    return {"spec": {"training": {"learningRate": f"{min(number * _SLOWER, usual):.6g}"}}}


def _longer_waits(job: SeenJob) -> Patch | None:
    """Return longer deadlines for detecting a stall: that of the ranks' watchdog and, if it is set, the operator's."""
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
    """Return a setting in a part of the spec, from the manifest or, if it is not set there, from the plan."""
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
    """Return the JSON merge patch (RFC 7396) from one object to the other; empty if they are equal."""
    patch: Patch = {key: None for key in before if key not in after}
    for key, value in after.items():
        earlier = before.get(key)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            inner = merge_patch(earlier, value)
            if inner:
                patch[key] = inner
        # Compared as text, because True == 1 in Python.
        elif key not in before or json.dumps(earlier) != json.dumps(value):
            patch[key] = value
    return patch


def assignments(patch: Mapping[str, Any], path: str) -> Iterable[str]:
    """Yield a patch as arguments of `fork --set`: strings as they are, other values as JSON, nothing after `=` for a removal."""
    for key, value in patch.items():
        place = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from assignments(value, f"{place}.")
        else:
            yield f"{place}=" + ("" if value is None else value if isinstance(value, str) else json.dumps(value))
