"""What tests that train a model on a few ranks have in common: an objective, documents, and parts put together."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


class Unchanged:
    """An objective that changes nothing."""

    def install(self, model: nn.Module) -> None:
        pass


def documents(vocabulary: int = 256, shortest: int = 20) -> list[torch.Tensor]:
    """Tokens of four documents, (1, length) each, always the same."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocabulary, (1, shortest + number), generator=generator) for number in range(4)]


def whole(parts: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Flat parameters out of every rank's parts, name -> (global shape, first element, values); NaN where no rank has one."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, (shape, start, values) in part.items():
            flat = found.setdefault(name, torch.full((torch.Size(shape).numel(),), torch.nan))
            flat[start : start + len(values)] = torch.as_tensor(values)
    return found
