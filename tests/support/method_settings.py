"""Settings of PEFT's methods with which they fit a tiny model, as `spec.method.settings` writes them."""

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "LoHa": {"r": 4},
    "LoKr": {"r": 4},
    "VeRA": {"r": 8},
    "OFT": {"oftBlockSize": 8, "r": 0},
    "BOFT": {"boftBlockSize": 4},
    "HRA": {"r": 4},
    "MiSS": {"r": 4},
    "TrainableTokens": {"tokenIndices": list(range(256))},
}
"""Settings whose defaults in PEFT are too large for a model of 32 channels, or that have no default."""
