"""What the config.json of well-known models says of their sizes (settings that change no shape are left out)."""

from typing import Any

from tests.support.cases import table

CONFIGS: dict[str, dict[str, Any]] = table(__file__, "CONFIGS")
"""By the name under which they were published."""
