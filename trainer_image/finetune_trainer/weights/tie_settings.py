"""What config.json says of embeddings that share their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TIE_FIELD = "tie_word_embeddings"


def tie_settings(config: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """What says in config.json whether the embeddings are tied."""
    changes: dict[str, Any] = {TIE_FIELD: is_tied}
    text = config.get("text_config")
    if isinstance(text, Mapping) and TIE_FIELD in text:
        changes["text_config"] = {**text, TIE_FIELD: is_tied}
    return changes
