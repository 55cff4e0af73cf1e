"""Canonical JSON of a plan and its digest."""

import hashlib
import json

from finetune_job.plan.run_plan import RunPlan


def canonical_json(plan: RunPlan) -> str:
    """The plan as JSON with sorted keys and no spaces: equal plans give equal bytes."""
    return json.dumps(plan.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def plan_sha256(plan: RunPlan) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal."""
    return text_sha256(canonical_json(plan))


def text_sha256(text: str) -> str:
    """SHA-256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
