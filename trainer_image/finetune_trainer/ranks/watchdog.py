"""A thread in each rank notices when training stops making progress; all ranks then write their stacks and exit.

The training loop reports what it has finished or begun through a `Heartbeat`. Collectives hang when a rank stops, so watchdogs
communicate through small files: each keeps a record of its rank, the first to reach a verdict writes it down, and the others read
it at their next turn. One overdue rank is not enough for a verdict, since it may be waiting for a rank with a long activity, such
as the export (see stalls.py).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.names import Role
from finetune_trainer.context import RunContext
from finetune_trainer.files import read_own, temporary_beside, write_durably
from finetune_trainer.ranks.reports import date_echo, rank_report_name, write_rank_report
from finetune_trainer.ranks.stalls import (
    JOIN,
    STALLED_FILE,
    HeartbeatRecord,
    SilenceDetector,
    Stall,
    StallTimeouts,
    find_stall,
    flight_recorder_name,
    heartbeat_file_name,
    read_heartbeat,
    read_stall,
    stacks_name,
    stall_timeouts,
)

log = logging.getLogger(__name__)
FLIGHT_RECORDER_SECONDS = 10.0
"""Time that the collective library may take to write its records. The library itself may be what hangs."""
_STACKS_BYTES = 1 << 16
_LIBRARIES = ("site-packages", f"python{sys.version_info.major}.{sys.version_info.minor}{os.sep}")
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_INNERMOST = 6
"""Number of innermost frames that are searched for a collective."""
STEP = "step"
"""Activity for a finished optimizer step. Everything before the first step, such as loading and compiling, counts as long."""


@dataclass(frozen=True)
class Beat:
    """A sign of life of the training loop."""

    what: str
    step: int
    at: float
    """Time on this process's monotonic clock."""
    is_long: bool
    """Whether the next activity may take longer than a step."""


class Heartbeat:
    """The latest beat, written by a rank's main thread and read by its watchdog. No lock: a write replaces one reference."""

    def __init__(self) -> None:
        self.latest = Beat("start", 0, time.monotonic(), is_long=True)
        self._has_stepped = False

    def beat(self, what: str, step: int) -> None:
        """Record that `what`, such as `STEP`, an evaluation batch or a save, was finished after optimizer step `step`."""
        self._has_stepped = self._has_stepped or what == STEP
        self.latest = Beat(what, step, time.monotonic(), is_long=not self._has_stepped)

    def begin(self, what: str, step: int) -> None:
        """Record that `what`, such as a save or the export, begins and may take longer than a step."""
        self.latest = Beat(what, step, time.monotonic(), is_long=True)


class Watchdog:
    """The watchdog of one rank, which runs in a thread while the body of `watching` runs."""

    def __init__(self, context: RunContext, heartbeat: Heartbeat, *, rank: int, world_size: int, node_rank: int) -> None:
        self._heartbeat, self._rank, self._world_size, self._node_rank = heartbeat, rank, world_size, node_rank
        self._attempt = context.attempt
        self._directory = context.workspace.stacks(context.attempt)
        self._reports = context.workspace.reports(Role.TRAIN.value, context.attempt)
        self._timeouts: StallTimeouts = stall_timeouts(context.plan.training.step_timeout_seconds)
        self._detector: SilenceDetector | None = None
        self._complete_since: float | None = None
        """Time on the monotonic clock at which records of all ranks were first seen."""
        self._turn = 0
        self._ended = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the body runs."""
        record_collectives(self._directory)
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join(self._timeouts.turn)
            faulthandler.cancel_dump_traceback_later()
            with suppress(OSError):
                (self._directory / heartbeat_file_name(self._rank)).unlink(missing_ok=True)
                # If the directory still holds other ranks' files, or traces, this fails and the directory stays.
                self._directory.rmdir()

    def _watch(self) -> None:
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
        while not self._ended.is_set():
            # This writes stacks to the rank's log even if a stuck extension never releases the GIL. In that case, this thread
            # no longer runs, and the other ranks find this rank silent.
            faulthandler.dump_traceback_later(self._timeouts.silence, file=sys.__stderr__ or sys.stderr)
            try:
                self._look()
            except Exception:
                # The error is only logged: if it ended this thread, nothing would watch the ranks.
                log.exception("the watchdog of rank %d could not look at the ranks", self._rank)
            self._ended.wait(self._timeouts.turn)

    def _look(self) -> None:
        stall = read_stall(self._directory)
        if stall is None:
            own = self._record()
            try:
                self._write(own)
            except OSError as error:
                # A full or absent workspace may become writable again, so keep watching.
                log.warning("the watchdog of rank %d cannot write: %s", self._rank, error)
            if not own.is_overdue:
                self._detector = None
                return
            stall = self._conclude(own)
        if stall is not None and not self._ended.is_set():
            self._end(stall)

    def _record(self) -> HeartbeatRecord:
        beat = self._heartbeat.latest
        idle = time.monotonic() - beat.at
        self._turn += 1
        stack = main_stack(self._main)
        return HeartbeatRecord(
            rank=self._rank,
            node_rank=self._node_rank,
            pid=os.getpid(),
            turn=self._turn,
            what=beat.what,
            step=beat.step,
            idle_seconds=idle,
            is_overdue=self._is_overdue(beat, idle),
            collectives=entered_collectives(),
            is_in_collective=any(_COLLECTIVES in frame.filename for frame in stack[-_INNERMOST:]),
            at=place_in_own_code(stack),
        )

    def _is_overdue(self, beat: Beat, idle: float) -> bool:
        if beat.what != JOIN:
            return idle > self._timeouts.allowance(is_long=beat.is_long)
        # Ranks of another node may start much later; waiting for them is not a failure.
        if self._complete_since is None and len(list(self._directory.glob("heartbeat-*.json"))) >= self._world_size:
            self._complete_since = time.monotonic()
        return self._complete_since is not None and time.monotonic() - self._complete_since > self._timeouts.start

    def _write(self, record: HeartbeatRecord) -> None:
        path = self._directory / heartbeat_file_name(self._rank)
        temporary = temporary_beside(path)
        try:
            temporary.write_text(record.model_dump_json())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _conclude(self, own: HeartbeatRecord) -> Stall | None:
        records = {
            record.rank: record for record in map(read_heartbeat, sorted(self._directory.glob("heartbeat-*.json"))) if record
        }
        records[self._rank] = own
        self._detector = self._detector or SilenceDetector(self._world_size, self._timeouts.silence)
        silent = self._detector.silent(records)
        if silent is None:
            return None
        verdict = find_stall(records, silent, self._rank, time.time())
        return self._declare(verdict) if verdict is not None else None

    def _declare(self, stall: Stall) -> Stall:
        """Write this verdict for all ranks, unless another rank has written one first. Returns the verdict that counts."""
        path = self._directory / STALLED_FILE
        temporary = temporary_beside(path)
        try:
            temporary.write_text(stall.model_dump_json(indent=2))
            os.link(temporary, path)
        except FileExistsError:
            return read_stall(self._directory) or stall
        except OSError:
            # Without a writable workspace, the other ranks do not get the verdict, but this rank still ends.
            log.exception("the verdict could not be written")
        finally:
            with suppress(OSError):
                temporary.unlink()
        return stall

    def _end(self, stall: Stall) -> None:
        """Write this rank's traces, wait for the other ranks to do the same, and end the process."""
        log.error("%s", stall.message)
        faulthandler.cancel_dump_traceback_later()
        try:
            self._write_stacks()
            if self._rank != stall.rank:
                write_rank_report(self._reports, date_echo(stall.echo(self._rank, self._node_rank, self._attempt)))
            expected = [self._directory / stacks_name(rank) for rank in range(self._world_size) if rank not in stall.silent]
            deadline = time.monotonic() + self._timeouts.collection
            self._await(expected, deadline)
            if self._rank == stall.declared_by:
                write_rank_report(self._reports, stall.report(self._attempt, self._stacks_of(stall.rank)))
            # torchrun kills all ranks of a node as soon as one exits, so no rank may exit before the report is written.
            self._await([self._reports / rank_report_name(stall.rank)], deadline + self._timeouts.turn)
        except Exception:
            log.exception("rank %d could not write all of its traces", self._rank)
        finally:
            logging.shutdown()
            failure = FailureClass.STALLED if self._rank == stall.rank else FailureClass.COLLECTIVE
            os._exit(EXIT_CODES[failure])

    def _await(self, paths: list[Path], deadline: float) -> None:
        # Files that other nodes write cause no file system events here, so this polls.
        while time.monotonic() < deadline and not all(path.exists() for path in paths):
            time.sleep(0.1)

    def _write_stacks(self) -> None:
        path = self._directory / stacks_name(self._rank)
        temporary = temporary_beside(path)
        with temporary.open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
        temporary.replace(path)
        recording = threading.Thread(target=self._write_flight_recorder, daemon=True)
        recording.start()
        recording.join(FLIGHT_RECORDER_SECONDS)

    def _write_flight_recorder(self) -> None:
        with suppress(OSError, RuntimeError):
            content = flight_recorder()
            if content:
                write_durably(self._directory / flight_recorder_name(self._rank), content)

    def _stacks_of(self, rank: int) -> str:
        try:
            return read_own(self._directory / stacks_name(rank)).decode(errors="replace")[-_STACKS_BYTES:]
        except OSError:
            return ""


def main_stack(thread: int | None) -> list[traceback.FrameSummary]:
    """Frames of a thread, outermost first, without their source lines."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)  # noqa: SLF001 - the documented way to another thread's stack
    return list(traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False))[::-1] if frame else []


def place_in_own_code(stack: list[traceback.FrameSummary]) -> str:
    """Return `file:line in function` of the innermost frame outside libraries, or of the innermost of all if there is none."""
    own = [frame for frame in stack if not any(part in frame.filename for part in (*_LIBRARIES, "<"))]
    if not stack:
        return "an unknown place"
    frame = (own or stack)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}"


def entered_collectives() -> int:
    """Return how many collectives this process has entered, over all process groups; 0 before it has joined a group."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return 0
    entered = 0
    for group in list(distributed._world.pg_map):  # noqa: SLF001 - torch has no public list of groups
        with suppress(RuntimeError):
            entered += group._get_sequence_number_for_group()  # noqa: SLF001 - nor a public count
    return entered


def record_collectives(directory: Path) -> None:
    """Make NCCL write its records next to the stacks if NCCL itself detects a timeout. Call this before joining the group."""
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(directory / "nccl-timeout-rank-"))
    os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "1")


def flight_recorder() -> bytes:
    """Return NCCL's records of the latest collectives, or gloo's if NCCL is not used, as JSON; empty if there are none."""
    library: Any = sys.modules.get("torch._C._distributed_c10d")
    distributed: Any = sys.modules.get("torch.distributed")
    if library is None or distributed is None or not distributed.is_initialized():
        return b""
    # JSON can be read safely; the other format is a pickle.
    name = "_dump_nccl_trace_json" if "nccl" in str(distributed.get_backend_config()) else "_dump_fr_trace_json"
    dump: Callable[[], bytes] | None = getattr(library, name, None)
    return dump() if dump else b""
