"""Kernels, algorithms and the order of sums, fixed so that a rank computes the same bits each time on the same kind of device.

On a GPU libraries choose between kernels by what they measure or by how much workspace is free, and some add up in the order in
which threads come. On a CPU the same settings leave out what torch knows to be without a fixed order there.
"""

from __future__ import annotations

import logging
import os

import torch

log = logging.getLogger(__name__)

ENVIRONMENT = {
    # Without a workspace of a fixed size cuBLAS takes other kernels when streams share one.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Which ring or tree adds up, in which pieces: NCCL else measures the links, and sums in switches have an order of their own.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "4",
    "NCCL_MAX_NCHANNELS": "4",
    "NCCL_NVLS_ENABLE": "0",
}
"""Read once, when the first context or communicator is made. What a profile sets itself stays: it is fixed, too."""


def keep_float32() -> None:
    """Let no product of float32 round its factors to TF32, whatever a variable or a default of torch's says. Any job's rank calls
    it: a type that is set is the type that computes.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def pin_kernels() -> dict[str, str]:
    """Pin them in this process; the variables that then hold. Call before the first CUDA context and before the gang joins.

    From then on torch raises RuntimeError for an operation that has no fixed order on the device.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(mode=True)
    # Filling what will be overwritten takes time, and changes no result of code that reads nothing it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Flash attention has a backward pass in one order of sums; cuDNN promises none.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    held = {name: os.environ[name] for name in ENVIRONMENT}
    log.info("deterministic kernels: %s", ", ".join(f"{name}={value}" for name, value in held.items()))
    return held
