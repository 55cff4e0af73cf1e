"""Which class of failure an exception means."""

import errno

import pytest
import torch
from safetensors import SafetensorError

from finetune_job.failures import FailureClass
from finetune_trainer.errors import DataError, classify


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("no records"), FailureClass.USER_DATA),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), FailureClass.DEVICE_OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device", "/claims/w/x"), FailureClass.DISK_FULL),
        (OSError(errno.EACCES, "Permission denied"), FailureClass.INTERNAL),
        (RuntimeError("[pair.cc:561] Connection closed by peer [10.0.0.7]:13237"), FailureClass.COLLECTIVE),
        (torch.distributed.DistBackendError("NCCL error in: unhandled system error"), FailureClass.COLLECTIVE),
        (torch.distributed.DistNetworkError("The client socket has timed out"), FailureClass.COLLECTIVE),
        (SafetensorError("header too large"), FailureClass.USER_MODEL),
        (MemoryError(), FailureClass.HOST_OUT_OF_MEMORY),
        (ValueError("something else"), FailureClass.INTERNAL),
    ],
    ids=lambda value: getattr(value, "name", None) or type(value).__name__,
)
def test_exceptions_of_libraries_have_a_class(error: BaseException, expected: FailureClass) -> None:
    assert classify(error)[0] is expected


def test_the_cause_of_an_exception_is_classified_too() -> None:
    error = ValueError("could not write")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/claims/w/rank-00000.safetensors")
    assert classify(error)[0] is FailureClass.DISK_FULL
