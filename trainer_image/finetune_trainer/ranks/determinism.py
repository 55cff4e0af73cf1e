"""Fixes kernels, algorithms and the order of summation, so that a rank computes the same bits on the same kind of device.

On a GPU, libraries choose kernels by timing them or by the free workspace, and some kernels sum in the order in which threads
finish. On a CPU, the same settings make torch refuse operations that it knows to be nondeterministic there.
"""

from __future__ import annotations

import logging
import os

import torch

log = logging.getLogger(__name__)

ENVIRONMENT = {
    # Without a workspace of fixed size, cuBLAS may choose different kernels when streams share a workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Otherwise NCCL would choose ring or tree and chunk sizes by measuring links, and switches would sum in their own order.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "4",
    "NCCL_MAX_NCHANNELS": "4",
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables that libraries read once, when the first context or communicator is created. Values that a profile sets are
kept, since they are also fixed.
"""


def keep_float32() -> None:
    """Keep float32 matrix products from rounding their inputs to TF32, whatever an environment variable or torch's default says.

    Every rank of every job calls this, so that the chosen element type is the one used for computing.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def pin_kernels() -> dict[str, str]:
    """Pin the kernels in this process, and return the environment variables in effect.

    Call this before the first CUDA context is created and before the gang joins. Afterwards torch raises RuntimeError for any
    operation that is nondeterministic on the device.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(mode=True)
    # Filling new memory takes time, and does not help code that never reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Flash attention has a backward pass that sums in a fixed order; cuDNN does not guarantee one.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    variables = {name: os.environ[name] for name in ENVIRONMENT}
    log.info("deterministic kernels: %s", ", ".join(f"{name}={value}" for name, value in variables.items()))
    return variables
