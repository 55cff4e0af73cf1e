"""A document of a manifest -> a model of the API, or pydantic's complaints."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


def read(model: type[M], content: Any) -> M:
    """Raises ValidationError."""
    # JSON is where strictness and the words of enumerations go together.
    return model.model_validate_json(json.dumps(content), strict=True, by_alias=True, by_name=False)


def with_generated_name(content: Any) -> Any:
    """Add a name like the one that Kubernetes makes of metadata.generateName: at most 58 of its characters, and five more."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or metadata.get("name") is not None:
        return content
    beginning = metadata.get("generateName")
    if not isinstance(beginning, str) or not beginning:
        return content
    return content | {"metadata": metadata | {"name": f"{beginning[:58]}xxxxx"}}
