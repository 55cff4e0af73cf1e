"""This process as a rank, and the small messages by which ranks agree on decisions.

Messages are JSON of a fixed form and bounded length, never pickles: torch does not authenticate members, so any program that can
reach a gang's ports can join it, and unpickling its message would run its code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter, ValidationError

from finetune_job.api.training import TrainingSpec
from finetune_trainer.errors import InvariantError
from finetune_trainer.ranks.stalls import stall_timeouts

T = TypeVar("T")
STEP_TIMEOUT_SECONDS: int = TrainingSpec.model_fields["step_timeout_seconds"].default
_AFTER_THE_WATCHDOG = timedelta(minutes=1)
ENVIRONMENT = "env://"
"""URL with which torch reads rank 0's address from torchrun's environment variables."""
MOST_MESSAGE_BYTES = 16 << 20
"""Maximum size of a rank's message in bytes. The longest messages list unusable checkpoints, with a sentence for each."""
EntryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]
"""Name of a directory entry; it cannot lead outside the directory."""


@dataclass(frozen=True)
class Gang:
    """This process as one of `world_size` ranks."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    messages: dist.ProcessGroup | None
    """A gloo group for small messages, which therefore need no accelerator; None if there is only one rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T, form: Any) -> list[T]:
        """Return every rank's value, by rank. form: the values' type, for pydantic. Raises InvariantError for other types."""
        if self.world_size == 1:
            return [value]
        message = _encoded(value, form)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(message)]), group=self.messages)
        sizes = [_checked_length(rank, int(length)) for rank, length in enumerate(lengths)]
        longest = max(sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(parts, _padded(message, longest), group=self.messages)
        return [_decoded(rank, part[:size], form) for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))]

    def from_first(self, value: T, form: Any) -> T:
        """Return rank 0's value, of type `form`; other ranks' values are ignored. Raises InvariantError for another type."""
        if self.world_size == 1:
            return value
        message = _encoded(value, form) if self.is_first else b""
        length = torch.tensor([len(message)])
        dist.broadcast(length, src=0, group=self.messages)
        size = _checked_length(0, int(length))
        part = _padded(message, size)
        dist.broadcast(part, src=0, group=self.messages)
        first_value: T = _decoded(0, part, form)
        return first_value

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(group=self.messages)

    def sum(self, values: list[float]) -> list[float]:
        """Sum each value over all ranks, in float64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.messages)
        return [float(value) for value in tensor]


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def _encoded(value: object, form: Any) -> bytes:
    return _adapter(form).dump_json(value)


def _padded(message: bytes, size: int) -> torch.Tensor:
    """Return the message, padded with spaces, as a uint8 tensor of shape [size]."""
    return torch.frombuffer(bytearray(message.ljust(size, b" ")), dtype=torch.uint8)


def _checked_length(rank: int, length: int) -> int:
    if not 0 < length <= MOST_MESSAGE_BYTES:
        raise InvariantError(f"rank {rank} announces a message of {length} bytes; 1 to {MOST_MESSAGE_BYTES} are possible")
    return length


def _decoded(rank: int, message: torch.Tensor, form: Any) -> Any:
    try:
        return _adapter(form).validate_json(message.numpy().tobytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvariantError(f"rank {rank} sent a message that is not of the form {form}: {first['msg']}") from None


def collective_timeout(step_timeout_seconds: float) -> timedelta:
    """Return the timeout of collectives. It leaves the watchdog, which knows more, enough time to end all ranks first.

    A dead rank is still noticed at once, because its connections close.
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
    """Join the process group, and leave it after success. The group uses NCCL if there is a GPU, otherwise gloo on the CPU.

    After a failure, the process stays in the group: leaving could wait for dead ranks, and the process ends anyway.
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
    """Return rank, world size and local rank, from torchrun's environment variables."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
