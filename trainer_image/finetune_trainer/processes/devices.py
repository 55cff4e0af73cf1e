"""Devices that a process must not ask for, because its forks are to use them: CUDA serves no fork of a process that asked.

torchrun's agent asks whether there is one before it starts ranks, to bind each to the processors next to its own
(torch.distributed.launcher.api.LaunchConfig, 2.15). With no device to see, torch answers without asking the driver.
"""

from __future__ import annotations

import json
import os

_HIDING = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""No device of either maker, and that this is found out without its driver."""
_BEFORE = "FINETUNE_DEVICES_BEFORE"
"""What the variables were, for forks and children."""


def hide_devices() -> None:
    """Have torch say in this process, and in those that it starts, that there is no device, and ask nobody for it."""
    os.environ[_BEFORE] = json.dumps({name: os.environ.get(name) for name in _HIDING})
    os.environ.update(_HIDING)


def show_devices() -> None:
    """Undo what a parent of this process hid. Does nothing if none did."""
    for name, value in json.loads(os.environ.pop(_BEFORE, "{}")).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
