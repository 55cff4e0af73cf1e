"""What gpu-check has measured on a device, for estimates of the time on such a device."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.calibration import CalibrationError, read_calibration
from tests.support.builders import a_job
from tests.unit.finetune_cli.checks.test_estimate import PRICED, config, manifest

__all__ = ["config"]
RUNNER = CliRunner()

# Seven tenths, a quarter, and a half of what kernels reached on the H200 by which steps were calculated.
SLOW = {
    "device": "1 x NVIDIA H100 80GB HBM3",
    "torch": "2.15.0",
    "seconds": 2.3,
    "problem": "",
    "rows": [
        {"part": "flops", "reached": 582e12, "share": 0.7 * 0.841, "assumed": 0.7},
        {"part": "attention", "reached": 118e12, "share": 0.25 * 0.478, "assumed": 0.4},
        {"part": "memory", "reached": 1.46e12, "share": 0.5 * 0.871, "assumed": 0.55},
    ],
}


def test_time_is_that_of_a_device_that_was_measured(tmp_path: Path, config: Path) -> None:
    (tmp_path / "profile.yaml").write_text(PRICED)
    (tmp_path / "calibration.json").write_text(json.dumps(SLOW))
    options = ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config), "--calibration"]
    options.append(str(tmp_path / "calibration.json"))
    text = RUNNER.invoke(app, [*options, "--profile", str(tmp_path / "profile.yaml")]).output
    assert "on NVIDIA-H100-80GB-HBM3, calculated. By what kernels reached there: 49% of its published peak" in text, text
    (found,) = json.loads(RUNNER.invoke(app, [*options, "-o", "json"]).output)["jobs"]
    assert found["time"]["device"] == "NVIDIA H100 80GB HBM3"
    parts = found["time"]["assumed"]
    assert parts == pytest.approx({"flops": 0.49, "attention": 0.1, "memory": 0.275, "link": 0.7})
    # Without a profile the job is one for the device that was measured, with its memory and what is chosen there.
    named = json.loads(RUNNER.invoke(app, [*options, "--gpu", "NVIDIA H100 80GB HBM3", "-o", "json"]).output)["jobs"]
    assert found == named[0]
    other = RUNNER.invoke(app, [*options, "--gpu", "H200"])
    assert other.exit_code == 2
    assert "--calibration: was measured on NVIDIA H100 80GB HBM3, and the job trains on H200" in other.stderr


def test_what_was_recorded_on_the_h200_is_what_time_is_calculated_by() -> None:
    recorded = json.loads(Path("bench/results/gpu/calibration.json").read_text())
    measured = read_calibration(json.dumps(recorded)).calibration
    assert asdict(measured) == pytest.approx({"flops": 0.7, "attention": 0.4, "memory": 0.55, "link": 0.7}, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": SLOW["rows"][:2]}, "nothing of memory was measured; give the file that"),
        ({"rows": SLOW["rows"][1:]}, "nothing of flops was measured"),
        ({"rows": [{**SLOW["rows"][0], "share": None}, *SLOW["rows"][1:]]}, "nothing of flops was measured"),
        ({"rows": [{**SLOW["rows"][0], "share": 0}]}, "rows.0.share: Input should be greater than or equal to 0.001"),
        ({"rows": [{**SLOW["rows"][0], "share": 5e-324}]}, "rows.0.share: Input should be greater than or equal to 0.001"),
        ({"rows": [{**SLOW["rows"][0], "share": math.nan}]}, "rows.0.share: Input should be a finite number"),
        ({"rows": [{**SLOW["rows"][0], "share": 70}]}, "rows.0.share: Input should be less than or equal to 1.2"),
        ({"rows": "many"}, "rows: Input should be a valid array"),
        ({"device": "1 x Tesla V100"}, "no peaks of 'Tesla V100' are known"),
        ({"problem": "CUDA error"}, "the measurement failed: 'CUDA error'"),
        ({"problem": "\x1b[2JCUDA\nerror"}, r"the measurement failed: '\x1b[2JCUDA\nerror'"),
        ({"device": "\x1b[2J\nNVIDIA H100"}, r"no peaks of '\x1b[2J\nNVIDIA H100' are known"),
    ],
)
def test_a_file_that_is_no_calibration_is_told(tmp_path: Path, config: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "calibration.json").write_text(json.dumps({**SLOW, **changes}))
    options = ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config)]
    result = RUNNER.invoke(app, [*options, "--calibration", str(tmp_path / "calibration.json")])
    assert result.exit_code == 2
    assert f"--calibration: {said}" in result.stderr


@pytest.mark.parametrize("content", ["", "[]", "{", "null", "[" * 5000, '{"device": "NVIDIA H100"}'])
def test_a_file_of_another_kind_is_told(content: str) -> None:
    with pytest.raises(CalibrationError, match=r"^--calibration: .*; give the file that"):
        read_calibration(content)
