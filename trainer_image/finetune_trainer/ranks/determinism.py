"""Kernels, algorithms and orders of sums are fixed, so that a rank computes the same bits on the same kind of device.

On a GPU, libraries choose kernels by measurement or by the free workspace, and some add up in the order in which threads arrive.
On a CPU the same settings refuse what torch knows to have no fixed order there.
"""

from __future__ import annotations

import logging
import os

import torch

log = logging.getLogger(__name__)

ENVIRONMENT = {
    # Without a workspace of a fixed size cuBLAS chooses other kernels when streams share one.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL would otherwise measure the links to choose a ring or tree and its pieces, and sums in switches have their own order.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "4",
    "NCCL_MAX_NCHANNELS": "4",
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables that are read once, when the first context or communicator is created. A profile's own values stay, since they are
fixed, too.
"""


def keep_float32() -> None:
    """Let no float32 product round its factors to TF32, whatever a variable or torch's default says.

    Every job's rank calls this, so that a chosen element type is the one that computes.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def pin_kernels() -> dict[str, str]:
    """Pin the kernels in this process; returns the variables in effect.

    Call this before the first CUDA context and before the gang joins. From then on torch raises RuntimeError for an operation
    that has no fixed order on the device.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(mode=True)
    # Filling memory that will be overwritten takes time, and code that never reads unwritten memory does not need it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Flash attention has a backward pass with a fixed order of sums; cuDNN promises none.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    variables = {name: os.environ[name] for name in ENVIRONMENT}
    log.info("deterministic kernels: %s", ", ".join(f"{name}={value}" for name, value in variables.items()))
    return variables
