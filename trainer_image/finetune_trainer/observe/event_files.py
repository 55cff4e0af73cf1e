"""TensorBoard's event files, which every run writes: scalars by step, in one file for each attempt (decision 0030)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
"""Name of the directory for event files, below the trackers' directory."""


class TensorBoard:
    """A `Tracker` that writes event files. It writes each event at once, so that logged events survive a SIGKILL."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def start(self, run: Mapping[str, Any]) -> None:
        """Begin this attempt's file. TensorBoard then ignores what earlier files hold for this or later steps. Raises OSError."""
        # The import takes a second, but it runs in the tracker's own thread, so training does not wait for it.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary, self._session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        folder = Path(run["directory"]) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which begin with the time in seconds. The process id distinguishes
        # two files from the same second.
        self._file = EventsWriter(str(folder / "events"), f".{run['attempt']}.{os.getpid()}")
        self._write(step=run["step"] + 1, session_log=self._session(status=self._session.START))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step. Raises OSError."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items() if name != "attempt"]
        self._write(step=step, summary=self._summary(value=scalars))

    def finish(self, _outcome: str) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._file.write_event(self._event(wall_time=self._clock(), **content))
        self._file.flush()
