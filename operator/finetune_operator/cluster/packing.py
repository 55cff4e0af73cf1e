"""Compresses the JSON of objects.

Plans and jobs consist mostly of field names, defaults and their reasons, which each of them repeats. With a preset dictionary
(RFC 1950) a compressed plan takes a fifth, 0.4 kB instead of 2.2, and a job half.
"""

from __future__ import annotations

import json
import zlib
from functools import cache
from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.plan.digest import canonical_json
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.cluster.raw_objects import read_json, write_json

FASTEST = 1
"""Compression level that takes two thirds of the time of the default one, for the same size."""


def packed(value: dict[str, Any]) -> tuple[bytes, int]:
    """Return the compressed JSON of an object, and its size before compression in bytes."""
    content = write_json(value)
    compressor = zlib.compressobj(FASTEST, zdict=_typical_content())
    return compressor.compress(content) + compressor.flush(), len(content)


def unpacked(content: bytes) -> dict[str, Any]:
    """Return an object that this process has packed."""
    decompressor = zlib.decompressobj(zdict=_typical_content())
    value: dict[str, Any] = read_json(decompressor.decompress(content) + decompressor.flush())
    return value


@cache
def _typical_content() -> bytes:
    """A job and a plan, as the cache holds them."""
    spec = FineTuneJobSpec.model_validate(
        {
            "model": {"source": "pvc://models/base"},
            "data": {"source": "pvc://data/train.jsonl"},
            "training": {"maxSteps": 100, "globalBatchSize": 8},
            "workspace": {"claimName": "workspace"},
            "output": {"destination": "pvc://results/tuned"},
        }
    )
    identity, profile = JobIdentity(namespace="team", name="job", uid="0" * 8), FineTuneProfileSpec(trainer_image="trainer")
    plan = resolve(identity, spec, profile)
    time = "2026-01-01T00:00:00Z"
    choices = [{"field": choice.field, "value": json.dumps(choice.value), "reason": choice.reason} for choice in plan.choices]
    conditions = [
        {"type": kind, "status": "True", "reason": Reason.COMPLETED, "message": "", "lastTransitionTime": time}
        for kind in ConditionType
    ]
    attempt = {"role": "train", "number": 0, "outcome": "Succeeded", "startTime": time, "endTime": time}
    job = {
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        "status": {
            "observedGeneration": 1,
            "phase": "Succeeded",
            "startTime": time,
            "completionTime": time,
            "plan": {"choices": choices},
            "conditions": conditions,
            "attempts": [attempt],
        },
    }
    return write_json(job) + write_json({"plan": canonical_json(plan)})
