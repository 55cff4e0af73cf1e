"""Opens the input files of a merge for reads at any position from several threads, and counts the bytes read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.storage import read_some, translate_os_errors

if TYPE_CHECKING:
    import torch


class Sources:
    """Input files, held open. Raises BrokenCheckpointError if a file ends early, and StorageError if one cannot be read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._counting = threading.Lock()
        try:
            for path in sorted(paths):
                with translate_os_errors(path, "read"):
                    descriptor = os.open(path, os.O_RDONLY)
                    self._descriptors[path] = descriptor
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            self.close()
            raise

    def read_into(self, tensor: TensorHeader, first_byte: int, target: memoryview) -> None:
        """Fill `target` with the tensor's bytes, starting at `first_byte`."""
        with translate_os_errors(tensor.file, "read"):
            count = read_some(self._descriptors[tensor.file], target, tensor.offset + first_byte)
        if count < len(target):
            raise BrokenCheckpointError(
                f"{tensor.file} ended inside tensor {tensor.name} while it was read: {len(target) - count} of "
                f"{tensor.num_bytes} bytes are missing. Fetch or save the file again."
            )
        with self._counting:
            self.bytes_read += count

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """Read a whole tensor in its own dtype and shape."""
        # Imported here, so that copying bytes does not wait for torch.
        import torch

        from finetune_trainer.weights.rounding import READ_DTYPES

        data = torch.empty(header.num_bytes, dtype=torch.uint8)
        if header.num_bytes:
            self.read_into(header, 0, data.numpy().data)
        return data.view(READ_DTYPES[header.dtype]).view(header.shape)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
