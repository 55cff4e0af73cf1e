"""The facts about one field of the API: type, default, unit, bounds, meaning, and its effect on GPU and CPU.

All facts except units and effects on devices come from the schema of the pydantic models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from finetune_job.api.base import DECIMAL_PATTERN, DESTINATION_PATTERN, SIZE_PATTERN, SOURCE_PATTERN
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.api.status import FineTuneJobStatus
from finetune_job.crd import Schema, structural_schema
from finetune_job.names import JOB_KIND, PROFILE_KIND

ROOTS = (
    (JOB_KIND, "spec", FineTuneJobSpec),
    (JOB_KIND, "status", FineTuneJobStatus),
    (PROFILE_KIND, "spec", FineTuneProfileSpec),
)
_FORMS = {
    DECIMAL_PATTERN: 'number in quotes, as in "2e-4"',
    SIZE_PATTERN: "size, as in 5GB or 512Mi",
    SOURCE_PATTERN: "address to read",
    DESTINATION_PATTERN: "address to write",
    r"^[0-9a-f]{40}$": "commit of 40 digits",
    r"^[1-9][0-9]{0,9}(Ki|Mi|Gi|Ti)$": "size, as in 100Gi",
    r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$": "quantity, as in 500m or 80Gi",
}
"""Pattern of a string field -> its type in words."""
_UNITS = (
    ("Seconds", "seconds"),
    ("everySteps", "optimizer steps"),
    ("maxSteps", "optimizer steps"),
    ("epochs", "passes over the data"),
    ("SequenceLength", "tokens"),
    ("maxPositions", "tokens"),
    ("BatchSize", "sequences"),
    ("ShardSize", "bytes, as in 5GB or 512Mi"),
    ("minNumParams", "parameters"),
    ("processesPerNode", "ranks"),
    ("nodes", "pods"),
    ("bits", "bits"),
    ("storage", "bytes, as in 100Gi"),
    ("emory", "bytes, as in 80Gi"),
)
"""Suffix of a field's path -> the unit of its value."""
SAME_ON_BOTH = "the same on GPU and CPU"
DEVICES = {
    "spec.profile": "a profile with gpu trains on GPUs, any other one on CPU cores",
    "spec.parallelism.processesPerNode": "GPU: the GPUs of a node, one for each rank; CPU: ranks that share the cores of a pod",
    "spec.parallelism.fsdp.syncModuleStates": "GPU: version 1 broadcasts rank 0's weights; CPU: no effect, each rank reads them",
    "spec.parallelism.fsdp.offloadParams": "GPU: parameters wait in pinned memory of the node; CPU: there is nothing to offload",
    "spec.parallelism.fsdp.reshardAfterForward": "unset: chosen by a GPU's memory, or a rank's share of a pod's",
    "spec.training.microBatchSize": "unset: chosen by a GPU's memory, or a rank's share of a pod's",
    "spec.training.activationCheckpointing": "unset: chosen by a GPU's memory, or a rank's share of a pod's",
    "spec.training.compile": "CPU: the image needs a C++ compiler",
    "spec.checkpoint.asynchronous": "GPU: the copy is in pinned memory of the node; CPU: in the same memory as the model",
}
"""Path in a FineTuneJob -> how the field's effect differs between GPU and CPU."""


@dataclass(frozen=True)
class FieldFacts:
    """The facts about one field, named as in manifests."""

    kind: str
    """The kind of object that has the field."""
    path: str
    """The path, such as `spec.data.datasets[].source`."""
    type: str
    """The type in words."""
    is_text: bool
    takes_any_key: bool
    """Whether the manifest chooses the names of the fields below this one, as in a map."""
    default: str
    """The default as JSON; empty if the field has none, in which case `meaning` says what happens if it is unset."""
    is_required: bool
    unit: str
    bounds: str
    pattern: str
    """Regular expression; empty if there is none, or if `type` describes it in words."""
    meaning: str
    device: str
    """A note on what the field does on GPU and on CPU; empty for fields that no run reads."""
    children: tuple[str, ...]
    """Names of the fields below this one."""
    values: tuple[str, ...]
    """All values that the field, or an item of its list, may have; empty if the schema does not list them."""


@cache
def all_fields() -> tuple[FieldFacts, ...]:
    """List the fields of FineTuneJobs and FineTuneProfiles, parents before children."""
    return tuple(
        facts
        for kind, root, model in ROOTS
        for facts in _facts(kind, root, structural_schema(model), is_required=root == "spec" and kind == JOB_KIND)
    )


def _facts(kind: str, path: str, node: Schema, *, is_required: bool) -> Iterator[FieldFacts]:
    inner: Schema = node.get("items", node)
    while "items" in inner:
        inner = inner["items"]
    properties: dict[str, Schema] = inner.get("properties", {})
    yield FieldFacts(
        kind=kind,
        path=path,
        type=type_text(node),
        is_text=node.get("type") == "string",
        takes_any_key=isinstance(node.get("additionalProperties"), dict) or "type" not in node,
        default=json.dumps(node["default"], ensure_ascii=False) if "default" in node else "",
        is_required=is_required,
        unit=next((unit for ending, unit in _UNITS if path.endswith(ending) and not properties), ""),
        bounds=bounds_text(node),
        pattern=node["pattern"] if node.get("pattern", DECIMAL_PATTERN) not in _FORMS else "",
        meaning=str(node.get("description", "")),
        device=DEVICES.get(path, SAME_ON_BOTH) if kind == JOB_KIND and path.startswith("spec") else "",
        children=tuple(properties),
        values=tuple(inner.get("enum", ())),
    )
    below = f"{path}[]" if node.get("type") == "array" else path
    for name, child in properties.items():
        yield from _facts(kind, f"{below}.{name}", child, is_required=name in inner.get("required", ()))


def type_text(node: Schema) -> str:
    """Return the type of a schema's value, in words."""
    match node.get("type"):
        case "array":
            return f"list of {type_text(node['items'])}"
        case "object" if isinstance(node.get("additionalProperties"), dict):
            return f"map of {type_text(node['additionalProperties'])}"
        case "string" if "enum" in node:
            return f"one of {', '.join(node['enum'])}"
        case "string" if node.get("pattern") in _FORMS:
            return _FORMS[node["pattern"]]
        case None:
            return "any value"
        case kind:
            return str(kind)


def bounds_text(node: Schema) -> str:
    """Return the bounds within which the API server accepts values, in words; empty if there are none."""
    parts = []
    for lowest, highest, unit in (
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " entries"),
        ("minProperties", "maxProperties", " entries"),
    ):
        low, high = node.get(lowest), node.get(highest)
        if low is not None and high is not None:
            parts.append(f"{low:,} to {high:,}{unit}")
        elif low is not None:
            parts.append(f"at least {low:,}{unit}")
        elif high is not None:
            parts.append(f"at most {high:,}{unit}")
    return ", ".join(parts)
