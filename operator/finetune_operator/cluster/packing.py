"""The JSON of an object, compressed.

A plan is for the most part names of fields, defaults and their reasons. Alone each plan repeats them; against a preset dictionary
(RFC 1950) it takes a fifth of that: 0.4 kB instead of 2.2.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.plan.digest import canonical_json
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_operator.cluster.json_text import read_json, write_json

FASTEST = 1
"""Level of compression: two thirds of the time of the usual one, for the same size."""


def packed(value: dict[str, Any]) -> tuple[bytes, int]:
    """The compressed JSON of an object, and how many bytes it was before."""
    content = write_json(value)
    return zlib.compress(content, FASTEST), len(content)


def packed_plan(text: str) -> tuple[bytes, int]:
    """The same of `{"plan": text}`. Takes half as long again, which a plan, packed once, is worth and a status is not."""
    content = write_json({"plan": text})
    compressor = zlib.compressobj(FASTEST, zdict=_typical_plan())
    return compressor.compress(content) + compressor.flush(), len(content)


def unpacked(content: bytes) -> dict[str, Any]:
    """What this process has packed, in either way: the dictionary is used where the content asks for it."""
    decompressor = zlib.decompressobj(zdict=_typical_plan())
    value: dict[str, Any] = read_json(decompressor.decompress(content) + decompressor.flush())
    return value


@cache
def _typical_plan() -> bytes:
    """As the cache holds it."""
    spec = {
        "model": {"source": "pvc://models/base"},
        "data": {"source": "pvc://data/train.jsonl"},
        "training": {"maxSteps": 100, "globalBatchSize": 8},
        "workspace": {"claimName": "workspace"},
        "output": {"destination": "pvc://results/tuned"},
    }
    identity, profile = JobIdentity(namespace="team", name="job", uid="0" * 8), FineTuneProfileSpec(trainer_image="trainer")
    return write_json({"plan": canonical_json(resolve(identity, FineTuneJobSpec.model_validate(spec), profile))})
