"""One stored matrix of experts, and which part of an adapter's factors belongs to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertPart:
    """Which part of PEFT's factors, which hold all experts of a parameter, belongs to one stored matrix."""

    expert: int
    num_experts: int
    first_row: int
    """Row of the expert's whole matrix, as the model holds it, at which the stored one begins: up after gate, for instance."""
    zeros_before: int = 0
    """Ranks of zeros that PEFT puts before the factors' own, fusing an adapter of one projection with those of its neighbours."""
    zeros_after: int = 0
