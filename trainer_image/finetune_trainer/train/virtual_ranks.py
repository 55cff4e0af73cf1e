"""Virtual ranks: the fixed parts of a global batch, whose gradients are summed in a fixed order on any number of ranks.

With an ordered reduction, the plan's ranks are virtual. A gang may have fewer ranks, each of which computes consecutive virtual
ranks. The random numbers and computations of a virtual rank depend only on its number, and every rank sums the gradients of all
virtual ranks in the order of their numbers, so the sum has the same bits for every size of the gang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from finetune_job.sharding import ORDERED_VALUES_AT_ONCE
from finetune_trainer.errors import InvariantError
from finetune_trainer.ranks.gang import Gang


@dataclass(frozen=True)
class VirtualRanks:
    """`count` virtual ranks, computed by a gang of at most `count` ranks."""

    count: int
    gang: Gang

    def __post_init__(self) -> None:
        if self.gang.world_size > self.count:
            raise InvariantError(f"{self.gang.world_size} ranks cannot share {self.count} virtual ranks")

    def of(self, rank: int) -> range:
        """Return the virtual ranks that rank `rank` computes; at least one."""
        return range(rank * self.count // self.gang.world_size, (rank + 1) * self.count // self.gang.world_size)

    @property
    def rounds(self) -> int:
        """Number of rounds, in each of which every rank computes one virtual rank.

        A rank with fewer virtual ranks computes its last one again and drops the result, since gathering needs all ranks.
        """
        return -(-self.count // self.gang.world_size)

    def in_round(self, number: int) -> tuple[int, bool]:
        """Return the virtual rank that this rank computes in round `number`, and whether its result counts."""
        own = self.of(self.gang.rank)
        return own[min(number, len(own) - 1)], number < len(own)


def flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Join all gradients into a flat float32 tensor, with zeros for parameters without one, and release the originals."""
    parts = []
    for parameter in parameters:
        values = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append(values.detach().float().reshape(-1))
        parameter.grad = None
    return torch.cat(parts)


def take_gradients(parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    """Set the parameters' gradients from `flat`, in the order of `flat_gradients` and in the parameters' element types."""
    for parameter, values in zip(parameters, torch.split(flat, [parameter.numel() for parameter in parameters]), strict=True):
        parameter.grad = values.view(parameter.shape).to(parameter.dtype)


def ordered_sum(own: Sequence[torch.Tensor], virtual: VirtualRanks) -> torch.Tensor:
    """Sum the gradients of all virtual ranks in the order of their numbers; every rank of every gang gets the same bits.

    own: flat float32 gradients of each virtual rank that counts on this rank, in order. All ranks call this together.
    """
    total = torch.empty_like(own[0])
    world_size = virtual.gang.world_size
    for first in range(0, total.numel(), ORDERED_VALUES_AT_ONCE):
        target = total[first : first + ORDERED_VALUES_AT_ONCE]
        mine = torch.zeros((virtual.rounds, target.numel()), dtype=target.dtype, device=target.device)
        for row, values in zip(mine, own, strict=False):
            row.copy_(values[first : first + ORDERED_VALUES_AT_ONCE])
        gathered = [mine]
        if world_size > 1:
            gathered = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(gathered, mine)
        rows = [gathered[rank][number] for rank in range(world_size) for number in range(len(virtual.of(rank)))]
        target.copy_(rows[0])
        for row in rows[1:]:
            target.add_(row)
    return total


def summed_in_order(own: Sequence[float], virtual: VirtualRanks) -> float:
    """Sum one float64 value per virtual rank, in the order of the ranks' numbers. All ranks call this together.

    own: the values of the virtual ranks that count on this rank, in order.
    """
    values = [0.0] * virtual.count
    first = virtual.of(virtual.gang.rank).start
    values[first : first + len(own)] = own
    return sum(virtual.gang.sum(values))
