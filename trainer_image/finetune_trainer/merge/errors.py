"""Why a merge was refused or failed. Every error names the tensor, file or field, the reason, and what to do.

`reason` is one CamelCase word for conditions and reports; the message is for people.
"""


class MergeError(Exception):
    """A merge that cannot be done right is not done at all."""

    reason = "MergeFailed"


class BrokenCheckpointError(MergeError):
    """A safetensors file or index is truncated, inconsistent or missing."""

    reason = "BrokenCheckpoint"


class UnsupportedAdapterError(MergeError):
    """The adapter's method cannot be merged exactly by streaming; merging it anyway would give a wrong model."""

    reason = "UnsupportedAdapter"


class UnsupportedBaseError(MergeError):
    """The base model cannot be merged into, e.g. because it is quantised."""

    reason = "UnsupportedBase"


class TiedWeightsError(MergeError):
    """The adapter changes one of several tensors that share memory, and the model cannot be written with them apart."""

    reason = "TiedWeights"


class AdapterTensorUnknownError(MergeError):
    """An adapter tensor matches no base weight; merging would silently drop trained values."""

    reason = "AdapterTensorUnknown"


class AdapterTensorMissingError(MergeError):
    """The adapter should hold a tensor that it does not; the save was incomplete."""

    reason = "AdapterTensorMissing"


class AdapterTensorDuplicateError(MergeError):
    """Two adapter tensors claim the same base weight."""

    reason = "AdapterTensorDuplicate"


class AdapterTensorMisshapedError(MergeError):
    """An adapter tensor does not fit its base weight or the rank in adapter_config.json."""

    reason = "AdapterTensorMisshaped"


class OutputExistsError(MergeError):
    """The output directory holds something else than this merge's result."""

    reason = "OutputExists"


class NotFiniteError(MergeError):
    """A merged weight is NaN or infinite."""

    reason = "NotFinite"


class StorageError(MergeError):
    """A file could not be read or written for a reason that lies in the storage; what was finished is kept for the next try."""

    reason = "StorageFailed"


class NoSpaceError(StorageError):
    """The output's file system is full, or a quota or limit of file sizes is reached."""

    reason = "DiskFull"


class InputChangedError(MergeError):
    """Base or adapter was written to while it was merged."""

    reason = "InputChanged"


class OutputBusyError(MergeError):
    """Another process merges into the same output."""

    reason = "OutputBusy"


class DeviceUnavailableError(MergeError):
    """The device that was asked for is not there."""

    reason = "DeviceUnavailable"
