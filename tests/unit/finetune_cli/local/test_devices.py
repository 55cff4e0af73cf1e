"""Whether there is a GPU, as the driver's program answers, or does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune_cli.local import devices
from finetune_cli.local.devices import has_gpu

LISTED = "GPU 0: NVIDIA H200 (UUID: GPU-df22b45f)"


@pytest.mark.parametrize(
    ("script", "visible", "expected"),
    [
        (f"echo '{LISTED}'", None, True),
        (f"echo '{LISTED}'", "0", True),
        (f"echo '{LISTED}'", "", False),
        ("echo 'No devices were found'", None, False),
        ("exit 0", None, False),
        (f"echo '{LISTED}'; exit 9", None, False),
        ("exec sleep 60", None, False),
        (None, None, False),
    ],
)
def test_what_the_driver_says(
    script: str | None, visible: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_SECONDS", 1.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    assert has_gpu() is expected
