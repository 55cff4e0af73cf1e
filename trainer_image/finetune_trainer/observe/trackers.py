"""Experiment trackers. Each is looked up by name, runs in a thread of its own, and cannot harm the run.

TensorBoard's files are always written; other trackers run if the job names them. Weights & Biases and MLflow are offered if the
image has their packages. Any other package in the image can offer a tracker as an entry point of the group `finetune.trackers`: a
callable without arguments that returns a `Tracker`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Protocol

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_job.trackers import ALWAYS, FIELD, GROUP, MLFLOW, WANDB, nearest_tracker
from finetune_trainer.observe.event_files import TensorBoard
from finetune_trainer.observe.services import MLflow, WeightsAndBiases

log = logging.getLogger(__name__)
WAITING_LINES = 10_000
"""Maximum number of lines that wait for a tracker; further lines are dropped and counted."""
FINISH_SECONDS = 5.0
"""Time that a run waits at its end for all trackers together. It is short, since a stopping pod has little time left."""


class Tracker(Protocol):
    """Interface of a tracker. One thread calls these methods in this order. An exception turns the tracker off."""

    def start(self, run: Mapping[str, Any]) -> None:
        """Begin a run.

        run: namespace, name and uid of the job, attempt, step (steps done before), total_steps, plan, and directory, which is a
        directory on the workspace for the tracker's files.
        """
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a line of the history. After a resume, steps may be logged again."""
        ...

    def finish(self, outcome: str) -> None:
        """End the run. outcome: `Succeeded`, or the class of the failure. Not called if the process is killed."""
        ...


BUILT_IN: dict[str, tuple[str | None, Callable[[], Tracker]]] = {
    ALWAYS: (None, TensorBoard),
    WANDB: ("wandb", WeightsAndBiases),
    MLFLOW: ("mlflow", MLflow),
}
"""Name of a tracker -> the package that it needs, and a function that creates the tracker."""


def offered_trackers() -> set[str]:
    """Return the names that a job may use in this image."""
    own = {name for name, (package, _) in BUILT_IN.items() if package is None or find_spec(package) is not None}
    return own | set(entry_points(group=GROUP).names)


def unknown_trackers(plan: RunPlan) -> Finding | None:
    """Return the finding that the job names trackers that no package of this image offers, or None."""
    offered = sorted(offered_trackers())
    unknown = [name for name in plan.training.trackers if name not in offered]
    if not unknown:
        return None
    near = {name: near_name for name in unknown if (near_name := nearest_tracker(name, offered)) is not None}
    write = "".join(f"write {near_name} for {name}, " for name, near_name in near.items()) + ("or " if near else "")
    return make_finding(
        "tracker-unknown",
        severity="error",
        field=FIELD,
        value=", ".join(unknown),
        message=f"no package in the trainer image offers a tracker of this name; it offers: {', '.join(offered)}",
        fix=f"{write}use a trainer image with a package that has an entry point of this name in the group {GROUP}, or remove the "
        "name",
    )


class Trackers:
    """All trackers of a run."""

    def __init__(self, names: Sequence[str], finish_seconds: float = FINISH_SECONDS) -> None:
        self._finish_seconds = finish_seconds
        self._feeds = [_Feed(name) for name in dict.fromkeys((ALWAYS, *names))]

    def start(self, run: Mapping[str, Any]) -> None:
        """Begin the run in all trackers."""
        for feed in self._feeds:
            feed.put(lambda tracker: tracker.start(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass a line to all trackers."""
        for feed in self._feeds:
            feed.put(lambda tracker: tracker.log(step, values))

    def finish(self, outcome: str) -> None:
        """End all trackers, and wait a while for pending calls."""
        for feed in self._feeds:
            feed.end(lambda tracker: tracker.finish(outcome))
        for feed in self._feeds:
            feed.wait(self._finish_seconds / len(self._feeds))


Call = Callable[[Tracker], None]


class _Feed:
    """One tracker, which runs in its own thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        """Add a call without waiting; it is dropped if too many calls are pending."""
        if self._calls.qsize() < WAITING_LINES:
            self._calls.put(call)
        else:
            self._dropped += 1

    def end(self, last: Call) -> None:
        """Add the last call."""
        self._calls.put(last)
        self._calls.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until the thread has ended or the time is over."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("tracker %s did not end within %.0f s and is abandoned", self._name, seconds)
        if self._dropped:
            log.warning("tracker %s was too slow: %d lines were dropped", self._name, self._dropped)

    def _run(self) -> None:
        try:
            if self._name in BUILT_IN:
                tracker = BUILT_IN[self._name][1]()
            else:
                (entry,) = entry_points(group=GROUP, name=self._name)
                tracker = entry.load()()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except Exception:
            log.exception("tracker %s failed and is off for the rest of the run", self._name)
            while self._calls.get() is not None:
                pass
