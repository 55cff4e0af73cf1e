"""What a forward pass is given, and in which element types it computes."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.memory.model_shape import DTYPE_BYTES

LENGTH_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens: matrix products on tensor cores are fast for such lengths."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one rank."""

    rows: int
    length: int
    """Tokens of a row, padding included."""
    has_mask: bool
    """Whether attention needs a mask: rows of several documents, or padded ones."""
    on_gpu: bool

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.length


@dataclass(frozen=True)
class Elements:
    """Element types of one run, by torch's names, and what becomes of them in a forward pass."""

    load: str
    """Base weights as they are held."""
    param: str | None
    """Gathered parameters in forward and backward; None: as they are held."""
    reduce: str | None
    """Gradients while they are reduced."""
    save: str
    """A fully fine-tuned model on disk."""
    casts_parameters: bool
    """Whether FSDP casts parameters to `param`, layer inputs and adapters included. Otherwise autocast casts inside each layer."""

    @property
    def stream(self) -> int:
        """Bytes of a value that layers hand on."""
        return DTYPE_BYTES[(self.param or self.load) if self.casts_parameters else self.load]

    @property
    def product(self) -> int:
        """Bytes of a value of a matrix product."""
        return DTYPE_BYTES[self.param or self.load]

    def adapter(self, held: str) -> int:
        """Bytes of a value that an adapter computes with."""
        return DTYPE_BYTES[self.param or held]

    def adapter_copies_input(self, held: str) -> bool:
        """Whether each adapter casts its input, and keeps a copy of its own: PEFT casts to the adapter's element type first."""
        if self.casts_parameters and self.param:
            return False
        return DTYPE_BYTES[held] != self.stream or (self.param is not None and DTYPE_BYTES[held] != self.product)

    @property
    def layers_copy_input(self) -> bool:
        """Whether autocast casts the input of each trained layer, which keeps the copy."""
        return self.stream != self.product
