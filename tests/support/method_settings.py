"""Settings of PEFT's methods with which they fit a tiny model, as `spec.method.settings` writes them."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "LoHa": {"r": 4},
    "LoKr": {"r": 4},
    "VeRA": {"r": 8},
    "OFT": {"oftBlockSize": 8, "r": 0},
    "BOFT": {"boftBlockSize": 4},
    "HRA": {"r": 4},
    "FourierFT": {"nFrequency": 50},
    "MiSS": {"r": 4},
    "VBLoRA": {"r": 2, "numVectors": 16, "vectorLength": 8},
    "HiRA": {"r": 4},
    "SHiRA": {"r": 4},
    "C3A": {"blockSize": 8},
    "WaveFT": {"nFrequency": 50},
    "DeLoRA": {"r": 4},
    "GraLoRA": {"r": 4},
    "RoAd": {"groupSize": 8},
    "GLoRA": {"r": 4},
    "Lily": {"r": 4},
    "PVeRA": {"r": 8},
    "UniLoRA": {"r": 4, "thetaDLength": 64, "initThetaDBound": "0.2"},
    "PSOFT": {"r": 4},
    "PEANuT": {"r": 4},
    "DEFT": {"r": 4},
    "TinyLoRA": {"weightTying": "1"},
    "TrainableTokens": {"tokenIndices": list(range(256))},
}
"""What PEFT's defaults make too large for a model of 32 channels, or what has no default."""
