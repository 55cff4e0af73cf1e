"""This process as a rank, and the few things that ranks agree on through small messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from finetune_job.api.training import TrainingSpec
from finetune_trainer.ranks.stalls import stall_timeouts

STEP_TIMEOUT_SECONDS: int = TrainingSpec.model_fields["step_timeout_seconds"].default
_AFTER_THE_WATCHDOG = timedelta(minutes=1)
ENVIRONMENT = "env://"
"""Where torchrun's children find the address of rank 0."""


@dataclass(frozen=True)
class Gang:
    """One rank among `world_size`."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    messages: dist.ProcessGroup | None
    """A gloo group for small messages, so that they need no accelerator; None in a world of one."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.messages)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.messages)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(group=self.messages)

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.messages)
        return [float(value) for value in tensor]


def collective_timeout(step_timeout_seconds: float) -> timedelta:
    """How long any collective waits for the other ranks: longer than the watchdog, which knows more, takes to end them all.

    A rank that dies is noticed at once all the same, because its connections close.
    """
    return timedelta(seconds=stall_timeouts(step_timeout_seconds).verdict) + _AFTER_THE_WATCHDOG


@contextmanager
def joined(
    rank: int,
    world_size: int,
    local_rank: int,
    init_method: str = ENVIRONMENT,
    step_timeout_seconds: float = STEP_TIMEOUT_SECONDS,
) -> Iterator[Gang]:
    """Join the process group and leave it after success. GPU with NCCL where there is one, else CPU with gloo.

    After a failure the group is left alone: leaving it could wait for ranks that are gone, and the process ends anyway.
    """
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Gang(0, 1, local_rank, device, None)
        return
    timeout = collective_timeout(step_timeout_seconds)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    messages: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[assignment]
    yield Gang(rank, world_size, local_rank, device, messages)
    dist.destroy_process_group()


def launched_rank() -> tuple[int, int, int]:
    """Rank, world size and local rank, from the variables by which torchrun tells them to its children."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
