"""Reads the files of a release and proves them on the way: what was hashed is what was sent."""

from __future__ import annotations

import hashlib
from types import TracebackType

from finetune_trainer.errors import CheckpointError
from finetune_trainer.release.files import ReleaseFile


class ProvenReader:
    """A file of a release, read from its beginning to its end."""

    def __init__(self, file: ReleaseFile) -> None:
        self._released, self._digest, self.offset = file, hashlib.sha256(), 0
        self._file = file.local.open("rb")

    def __enter__(self) -> ProvenReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """The next bytes: `size` of them, fewer only at the end. Raises OSError, CheckpointError."""
        content = self._file.read(size)
        self._digest.update(content)
        self.offset += len(content)
        if len(content) < size and self.offset < self._released.size:
            raise _damaged(self._released, f"it has only {self.offset} of {self._released.size} bytes")
        return content

    def skip_to(self, offset: int) -> None:
        """Read and hash what need not be sent again."""
        while self.offset < offset:
            self.read(min(1024**2, offset - self.offset))

    def prove(self) -> None:
        """The bytes were those of the release. Raises CheckpointError. Call it before anything makes them visible."""
        found = self._digest.hexdigest()
        if self.offset != self._released.size or self._file.read(1):
            raise _damaged(self._released, f"it has not the {self._released.size} bytes that it had")
        if found != self._released.sha256:
            raise _damaged(self._released, f"its sha256 is {found}, and {self._released.sha256} was to be published")


def whole(file: ReleaseFile) -> bytes:
    """All bytes of a small file, proven. Raises OSError, CheckpointError."""
    with ProvenReader(file) as reader:
        content = reader.read(file.size)
        reader.prove()
    return content


def _damaged(file: ReleaseFile, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file.local}: {why}", "it changed after the merge: delete the directory that holds it and run the merge again"
    )
