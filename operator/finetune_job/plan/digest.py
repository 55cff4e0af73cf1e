"""Canonical JSON of a plan and its digest."""

import hashlib
import json

from finetune_job.plan.run_plan import RunPlan

_SPEED_FIELDS: dict[str, set[str]] = {
    "training": {
        "micro_batch_size",
        "gradient_accumulation_steps",
        "activation_checkpointing",
        "compile",
        "reduction",
        "deterministic",
        "step_timeout_seconds",
        "trackers",
    }
}
"""Settings that affect how fast and where a run computes; the result differs at most by rounding."""
_SPEED_LORA_FIELDS = {"fused_forward"}
_LATER_LORA_FIELDS = {"target_parameters", "trainable_token_indices"}
"""Fields that older plans lack. The digest omits those that a plan does not set, so older plans keep their digest."""
_LATER_TRAINING_FIELDS = {"start_from"}
_LATER_MODEL_FIELDS = {"added_tokens"}
"""Fields of the model that older plans lack; the digest omits them if they are None or empty."""
_LEARNING_FIELDS = ("version", "job", "model", "data", "method", "training", "evaluation")


def canonical_json(plan: RunPlan) -> str:
    """Return the plan as JSON with sorted keys and no spaces: equal plans give equal bytes."""
    return json.dumps(plan.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def plan_sha256(plan: RunPlan) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal."""
    return text_sha256(canonical_json(plan))


def learning_sha256(plan: RunPlan) -> str:
    """Return the digest of all settings that affect the result. Checkpoints store it; the number of ranks does not change it."""
    content = plan.model_dump(mode="json", include=dict.fromkeys(_LEARNING_FIELDS, True))
    for part, excluded in _SPEED_FIELDS.items():
        for name in excluded:
            del content[part][name]
    for part, later in (("training", _LATER_TRAINING_FIELDS), ("model", _LATER_MODEL_FIELDS)):
        for name in later:
            if not content[part][name]:
                del content[part][name]
    lora = plan.method.lora
    if lora is not None and not lora.separate_token_rows:
        del content["method"]["lora"]["separate_token_rows"]
    for name in () if lora is None else _SPEED_LORA_FIELDS | _LATER_LORA_FIELDS - lora.model_fields_set:
        del content["method"]["lora"][name]
    return text_sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False))


def text_sha256(text: str) -> str:
    """SHA-256 of a string in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
