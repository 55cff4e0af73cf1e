"""Configurations of well-known models at their real sizes; nothing of that size is ever built."""

from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.support.cases import table

SIZES: dict[str, tuple[str, dict[str, Any]]] = table(__file__, "SIZES")


def configuration(name: str) -> PreTrainedConfig:
    """One of them."""
    kind, sizes = SIZES[name]
    made: PreTrainedConfig = getattr(transformers, kind)(**sizes)
    return made
