"""Measurements of `python -m bench.gpu.check calibration` on a device, for estimates of the time of jobs on such a device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from finetune_cli.exit_codes import ExitCode
from finetune_memory.devices import Calibration, Device, calibrated, device_of

OPTION = "--calibration"
_NUMBER_OF = re.compile(r"^[0-9]+ x ")
"""Text in front of the device's name."""


class CalibrationError(Exception):
    """The file is none that the tier writes; the text says why."""

    exit_code = ExitCode.UNUSABLE


class _Row(BaseModel):
    """A part, and which share of its published peak is reached."""

    part: str
    share: Annotated[float, Field(ge=0.001, le=1.2, allow_inf_nan=False)] | None = None
    """A device that clocks higher than its data sheet says may reach a little more than its peak."""


class _Measured(BaseModel):
    device: Annotated[str, Field(min_length=1, max_length=200)]
    problem: str = ""
    rows: Annotated[list[_Row], Field(max_length=100)]


@dataclass(frozen=True)
class MeasuredDevice:
    """A device, and which parts of its peaks training reaches there."""

    device: Device
    calibration: Calibration

    @property
    def name(self) -> str:
        return self.device.name

    def is_like(self, name: str) -> bool:
        """Whether a device of this name has the same published peaks."""
        other = device_of(name)
        return other is not None and (other.flops, other.memory) == (self.device.flops, self.device.memory)


def read_calibration(text: str) -> MeasuredDevice:
    """Read the text of the file. Raises CalibrationError."""
    try:
        measured = _Measured.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CalibrationError(_text(f"{place}: {first['msg']}" if place else str(first["msg"]))) from error
    if measured.problem:
        raise CalibrationError(f"{OPTION}: the measurement failed: {measured.problem[:200]!r}")
    name = _NUMBER_OF.sub("", measured.device)
    # It is shown as it is.
    device = device_of(name) if name.isprintable() else None
    if device is None:
        raise CalibrationError(f"{OPTION}: no peaks of {name!r} are known, of which these would be parts")
    shares = {row.part: row.share for row in measured.rows if row.share is not None}
    missing = [part for part in ("flops", "attention", "memory") if part not in shares]
    if missing:
        raise CalibrationError(_text(f"nothing of {', '.join(missing)} was measured"))
    return MeasuredDevice(device, calibrated(shares["flops"], shares["attention"], shares["memory"]))


def _text(problem: str) -> str:
    return f"{OPTION}: {problem}; give the file that `python -m bench.gpu.check calibration` writes on the device"
