"""Failures with their class: the errors of this package, and the meaning of libraries' exceptions."""

from __future__ import annotations

import errno
import re
from typing import ClassVar

from finetune_job.failures import FailureClass

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full file system, a quota, or a limit of file sizes."""
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
    """A checkpoint is complete, but of another run."""


class SaveError(TrainerError):
    """A checkpoint could not be written, because the storage fails or refuses writes. Older checkpoints are unharmed."""


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
    """The destination refuses the results until a human acts."""

    failure = FailureClass.DESTINATION_REFUSED


class DestinationUnavailableError(TrainerError):
    """The destination did not answer, or the connection broke off."""

    failure = FailureClass.DESTINATION_UNAVAILABLE


class DeviceFaultError(TrainerError):
    """A GPU computes wrong results, or reports that it is broken."""

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
"""Messages of the driver about a broken device: about its memory, its bus, or another process that keeps it busy."""
BROKEN_DEVICE_HINT = "cordon the node and have its device tested, as with dcgmi diag"


def classify(error: BaseException) -> tuple[FailureClass, str]:
    """Failure class and hint of any exception. If the exception itself has none, the chain of causes is searched."""
    seen: BaseException | None = error
    while seen is not None:
        failure = _classify_one(seen)
        if failure is not None:
            return failure
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
