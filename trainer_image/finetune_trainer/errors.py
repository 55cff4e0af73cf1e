"""Failures with their class: what this package raises, and what the exceptions of libraries mean."""

from __future__ import annotations

import errno
import re
from typing import ClassVar

from finetune_job.failures import FailureClass

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a file system that is full, a quota, or a limit of file sizes."""
REFUSED_WRITES = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers of a file or file system that may not be changed."""


class TrainerError(Exception):
    """A failure whose class is known. The message names the field or file, the value and the reason; the hint says what to do."""

    failure: ClassVar[FailureClass] = FailureClass.INTERNAL

    def __init__(self, message: str, hint: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.step = step


class ConfigError(TrainerError):
    """A setting cannot work with this model or machine."""

    failure = FailureClass.USER_CONFIG


class DataError(TrainerError):
    """The data set or what was prepared from it cannot be used."""

    failure = FailureClass.USER_DATA


class ModelError(TrainerError):
    """The base model is missing, damaged or of a kind that is not accepted."""

    failure = FailureClass.USER_MODEL


class NonFiniteError(TrainerError):
    """Loss or gradient norm is NaN or infinite."""

    failure = FailureClass.NON_FINITE


class CheckpointError(TrainerError):
    """A checkpoint cannot be what was written."""

    failure = FailureClass.CHECKPOINT_INVALID


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is whole, but of another run."""


class SaveError(TrainerError):
    """A checkpoint could not be written, because the storage fails or may not be written to. Older checkpoints are unharmed."""


class DiskFullSaveError(SaveError):
    """A checkpoint could not be written, because there is no room for it."""

    failure = FailureClass.DISK_FULL


class PlanMismatchError(TrainerError):
    """The plan file is not the one that was announced."""

    failure = FailureClass.PLAN_MISMATCH


class PreemptedError(TrainerError):
    """SIGTERM arrived; the state up to `step` is on the workspace."""

    failure = FailureClass.PREEMPTED


class VerificationError(TrainerError):
    """The merged model does not behave as base and adapter do."""

    failure = FailureClass.VERIFICATION_FAILED


class DestinationRefusedError(TrainerError):
    """The destination does not take the results until a human acts."""

    failure = FailureClass.DESTINATION_REFUSED


class DestinationUnavailableError(TrainerError):
    """The destination did not answer, or broke off."""

    failure = FailureClass.DESTINATION_UNAVAILABLE


class DeviceFaultError(TrainerError):
    """A GPU computes wrong results, or says itself that it is broken."""

    failure = FailureClass.DEVICE_FAULT


class InvariantError(TrainerError):
    """Something that this package guarantees does not hold: continuing would give a wrong model."""


OUT_OF_DEVICE_MEMORY_HINT = "lower microBatchSize or maxSequenceLength, or set activationCheckpointing: Full"
_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|socket|process group|rendezvous|broken pipe|TCPStore|heartbeat", re.IGNORECASE
)


_BROKEN_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|device\(s\) is/are busy or unavailable|hardware stack error|\bXid \d+",
    re.IGNORECASE,
)
"""What the driver says of a broken device: of its memory, its bus, or of a place in which another process keeps it."""
BROKEN_DEVICE_HINT = "cordon the node and have its device tested, as with dcgmi diag"


def classify(error: BaseException) -> tuple[FailureClass, str]:
    """Failure class and hint of any exception; the chain of causes is searched where the exception itself says nothing."""
    seen: BaseException | None = error
    while seen is not None:
        found = _classify_one(seen)
        if found is not None:
            return found
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return FailureClass.INTERNAL, ""


def _classify_one(error: BaseException) -> tuple[FailureClass, str] | None:
    if isinstance(error, TrainerError):
        return error.failure, error.hint
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return FailureClass.DISK_FULL, f"make room on the claim that holds {error.filename or 'the workspace'}, or enlarge it"
    if isinstance(error, MemoryError):
        return FailureClass.HOST_OUT_OF_MEMORY, "raise the memory of the profile's resources"
    name, module, text = type(error).__name__, type(error).__module__, str(error)
    if name == "OutOfMemoryError" or "CUDA out of memory" in text:
        return FailureClass.DEVICE_OUT_OF_MEMORY, OUT_OF_DEVICE_MEMORY_HINT
    if _BROKEN_DEVICE.search(text):
        return FailureClass.DEVICE_FAULT, BROKEN_DEVICE_HINT
    if "No space left on device" in text:
        return FailureClass.DISK_FULL, "make room on the claim, or enlarge it"
    if "can't allocate memory" in text:
        return FailureClass.HOST_OUT_OF_MEMORY, "raise the memory of the profile's resources"
    if name == "SafetensorError" or module.startswith("safetensors"):
        return FailureClass.USER_MODEL, "a safetensors file is damaged or incomplete; copy it to the claim again"
    if name in ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError"):
        return FailureClass.COLLECTIVE, ""
    if isinstance(error, RuntimeError | ConnectionError) and _COLLECTIVE.search(text):
        return FailureClass.COLLECTIVE, ""
    return None
