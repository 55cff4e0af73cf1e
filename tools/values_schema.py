"""The generated parts of the chart's values.schema.json: the fields of a profile, and the names of the alerts.

`python -m tools.values_schema` writes them into the file; the rest of the file is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.crd import structural_schema

FILE = Path(__file__).resolve().parents[1] / "charts" / "finetune-operator" / "values.schema.json"
RULES = FILE.parent / "files" / "rules.yaml"
DEFINITION = "profileSpec"
_OF_THE_CLUSTER = "x-kubernetes-"


def profile_definition() -> dict[str, Any]:
    """JSON schema of a profile's spec. Unlike the CRD it refuses unknown fields, because helm cannot prune them. The trainer
    image may be missing, because the chart has a default.
    """
    schema = _closed(structural_schema(FineTuneProfileSpec))
    schema["required"].remove("trainerImage")
    if not schema["required"]:
        del schema["required"]
    return schema


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    is_open = f"{_OF_THE_CLUSTER}preserve-unknown-fields" in node
    # Only the API server adds defaults.
    kept = {key: value for key, value in node.items() if not key.startswith(_OF_THE_CLUSTER) and key != "default"}
    if "properties" in kept:
        kept["properties"] = {name: _closed(child) for name, child in kept["properties"].items()}
        kept.setdefault("additionalProperties", is_open)
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = _closed(kept[key])
    return kept


def alerts_definition() -> dict[str, Any]:
    """JSON schema of the settings of each alert."""
    override = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "enabled": {"type": "boolean"},
            "for": {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d|w|y))+$"},
            "severity": {"type": "string", "minLength": 1},
        },
    }
    names = [alert["alert"] for alert in yaml.safe_load(RULES.read_text())["alerts"]]
    return {"type": "object", "additionalProperties": False, "patternProperties": {f"^({'|'.join(names)})$": override}}


def text(current: str) -> str:
    """Return the content of the file with new generated definitions."""
    schema = json.loads(current)
    schema["definitions"][DEFINITION] = profile_definition()
    schema["definitions"]["alerts"] = alerts_definition()
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(FILE.read_text()))
