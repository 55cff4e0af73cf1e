"""Errors of reading, merging or writing weights. Each names the tensor, file or field, the reason, and what to do."""

from finetune_job.failures import FailureClass
from finetune_trainer.errors import TrainerError


class MergeError(TrainerError):
    """A merge that cannot be done right is not done at all."""


class BrokenCheckpointError(MergeError):
    """A safetensors file or index is truncated, inconsistent or missing."""

    failure = FailureClass.USER_MODEL


class UnsupportedAdapterError(MergeError):
    """The adapter's method cannot be merged exactly by streaming; merging it anyway would give a wrong model."""

    failure = FailureClass.USER_CONFIG


class UnsupportedBaseError(MergeError):
    """The base model cannot be merged into, e.g. because it is quantised."""

    failure = FailureClass.USER_MODEL


class TiedWeightsError(MergeError):
    """The adapter changes one of several tensors that share memory, and the model cannot be written with them apart."""

    failure = FailureClass.USER_MODEL


class AdapterTensorUnknownError(MergeError):
    """An adapter tensor matches no base weight; merging would silently drop trained values."""

    failure = FailureClass.USER_MODEL


class AdapterTensorMissingError(MergeError):
    """The adapter should hold a tensor that it does not; the save was incomplete."""

    failure = FailureClass.USER_MODEL


class AdapterTensorDuplicateError(MergeError):
    """Two adapter tensors claim the same base weight."""

    failure = FailureClass.USER_MODEL


class AdapterTensorMisshapedError(MergeError):
    """An adapter tensor does not fit its base weight or the rank in adapter_config.json."""

    failure = FailureClass.USER_MODEL


class OutputExistsError(MergeError):
    """The output directory holds something else than this merge's result."""

    failure = FailureClass.USER_CONFIG


class NotFiniteError(MergeError):
    """A merged weight is NaN or infinite."""

    failure = FailureClass.NON_FINITE


class StorageError(MergeError):
    """A file could not be read or written because of the storage; what was finished is kept for the next try."""


class NoSpaceError(StorageError):
    """The output's file system is full, or a quota or limit of file sizes is reached."""

    failure = FailureClass.DISK_FULL


class InputChangedError(MergeError):
    """Base or adapter was written to while it was merged."""


class OutputBusyError(MergeError):
    """Another process merges into the same output."""


class DeviceUnavailableError(MergeError):
    """The device that was asked for is not there."""

    failure = FailureClass.USER_CONFIG
