"""Defines this package's errors, each with its class of failure, and classifies exceptions of libraries."""

from __future__ import annotations

import errno
import re
from typing import ClassVar

from finetune_job.failures import FailureClass

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Values of errno for a full file system, an exceeded quota, or an exceeded limit on file size."""
REFUSED_WRITES = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Values of errno for a file or file system that may not be written to."""


class TrainerError(Exception):
    """A failure of a known class. The message names the field or file, the value and the reason; the hint says what to do."""

    failure: ClassVar[FailureClass] = FailureClass.INTERNAL

    def __init__(self, message: str, hint: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.step = step


class ConfigError(TrainerError):
    """A setting cannot work with this model or machine."""

    failure = FailureClass.USER_CONFIG


class DataError(TrainerError):
    """The data set or the data prepared from it cannot be used."""

    failure = FailureClass.USER_DATA


class ModelError(TrainerError):
    """The base model is missing, damaged or not accepted."""

    failure = FailureClass.USER_MODEL


class NonFiniteError(TrainerError):
    """Loss or gradient norm is NaN or infinite."""

    failure = FailureClass.NON_FINITE


class CheckpointError(TrainerError):
    """A checkpoint is damaged."""

    failure = FailureClass.CHECKPOINT_INVALID


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is complete, but belongs to another run."""


class SaveError(TrainerError):
    """A checkpoint could not be written, because the storage failed or refused writes. Older checkpoints are intact."""


class DiskFullSaveError(SaveError):
    """A checkpoint could not be written, because there was no room for it."""

    failure = FailureClass.DISK_FULL


class PlanMismatchError(TrainerError):
    """The plan file differs from the announced plan, or cannot be read."""

    failure = FailureClass.PLAN_MISMATCH


class PreemptedError(TrainerError):
    """The process received SIGTERM. The state after step `step` is saved on the workspace."""

    failure = FailureClass.PREEMPTED


class VerificationError(TrainerError):
    """The merged model does not behave like the base with its adapter."""

    failure = FailureClass.VERIFICATION_FAILED


class DestinationRefusedError(TrainerError):
    """The destination refuses the results, and will do so until the user changes something."""

    failure = FailureClass.DESTINATION_REFUSED


class DestinationUnavailableError(TrainerError):
    """The destination did not answer, or the connection was lost."""

    failure = FailureClass.DESTINATION_UNAVAILABLE


class DeviceFaultError(TrainerError):
    """A GPU computes wrong results, or reports that it is broken."""

    failure = FailureClass.DEVICE_FAULT


class InvariantError(TrainerError):
    """A guarantee of this package does not hold. Continuing would produce a wrong model."""


OUT_OF_DEVICE_MEMORY_HINT = "lower microBatchSize or maxSequenceLength, or set activationCheckpointing: Full"
_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|socket|process group|rendezvous|broken pipe|TCPStore|heartbeat", re.IGNORECASE
)
_BROKEN_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|device\(s\) is/are busy or unavailable|hardware stack error|\bXid \d+",
    re.IGNORECASE,
)
"""Matches driver messages about a device that is broken, lost, or kept busy by another process."""
BROKEN_DEVICE_HINT = "cordon the node and test its device, for example with dcgmi diag"


def classify(error: BaseException) -> tuple[FailureClass, str]:
    """Return the failure class and hint for any exception. If the exception has no known class, its causes are searched."""
    cause: BaseException | None = error
    while cause is not None:
        failure = _classify_one(cause)
        if failure is not None:
            return failure
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return FailureClass.INTERNAL, ""


def _classify_one(error: BaseException) -> tuple[FailureClass, str] | None:
    name, module, text = type(error).__name__, type(error).__module__, str(error)
    if isinstance(error, TrainerError):
        return error.failure, error.hint
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return FailureClass.DISK_FULL, f"make room on the claim that holds {error.filename or 'the workspace'}, or enlarge it"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return FailureClass.HOST_OUT_OF_MEMORY, "raise the memory of the profile's resources"
    if name == "OutOfMemoryError" or "CUDA out of memory" in text:
        return FailureClass.DEVICE_OUT_OF_MEMORY, OUT_OF_DEVICE_MEMORY_HINT
    if _BROKEN_DEVICE.search(text):
        return FailureClass.DEVICE_FAULT, BROKEN_DEVICE_HINT
    if "No space left on device" in text:
        return FailureClass.DISK_FULL, "make room on the claim, or enlarge it"
    if name == "SafetensorError" or module.startswith("safetensors"):
        return FailureClass.USER_MODEL, "a safetensors file is damaged or incomplete; copy it to the claim again"
    is_collective = isinstance(error, RuntimeError | ConnectionError) and _COLLECTIVE.search(text)
    if is_collective or name in ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError"):
        return FailureClass.COLLECTIVE, ""
    return None
