"""Errors in reading, merging or writing weights. Each names the tensor, file or field, the reason, and what to do."""

from finetune_job.failures import FailureClass
from finetune_trainer.errors import TrainerError


class MergeError(TrainerError):
    """The merge cannot be done correctly, so it is not done at all."""


class BrokenCheckpointError(MergeError):
    """A safetensors file or index is truncated, inconsistent or missing."""

    failure = FailureClass.USER_MODEL


class UnsupportedAdapterError(MergeError):
    """The adapter's method cannot be merged exactly by streaming; merging it anyway would give a wrong model."""

    failure = FailureClass.USER_CONFIG


class UnsupportedBaseError(MergeError):
    """The adapter cannot be merged into this base model, e.g. because the base is quantised."""

    failure = FailureClass.USER_MODEL


class TiedWeightsError(MergeError):
    """The adapter changes one of several tensors that share memory, and the model cannot store them separately."""

    failure = FailureClass.USER_MODEL


class AdapterTensorError(MergeError):
    """An adapter tensor is missing, has a wrong shape, changes nothing in the base, or changes what another tensor changes.

    Merging anyway would silently drop trained values.
    """

    failure = FailureClass.USER_MODEL


class OutputExistsError(MergeError):
    """The output directory holds something other than this merge's result."""

    failure = FailureClass.USER_CONFIG


class NotFiniteError(MergeError):
    """A merged weight is NaN or infinite."""

    failure = FailureClass.NON_FINITE


class StorageError(MergeError):
    """A file could not be read or written because of the storage. Finished files are kept for the next attempt."""


class NoSpaceError(StorageError):
    """The output's file system is full, or a quota or a limit on file sizes is reached."""

    failure = FailureClass.DISK_FULL


class InputChangedError(MergeError):
    """The base or the adapter changed while it was merged."""


class OutputBusyError(MergeError):
    """Another process is merging into the same output."""


class DeviceUnavailableError(MergeError):
    """The requested device does not exist."""

    failure = FailureClass.USER_CONFIG
