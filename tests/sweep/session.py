"""Runs cases on gangs and judges them, one line of JSON each."""

from __future__ import annotations

import math
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sweep.case import UNSET, Case
from tests.sweep.gangs import GangPool
from tests.sweep.judge import Judgement, judged
from tests.sweep.observation import Failure, Observation, Verdict
from tests.sweep.rank import Request

BODY = "tests.sweep.rank:answer"


@dataclass(frozen=True)
class Result:
    """One case, judged."""

    case: Case
    verdict: Verdict | None
    observation: Observation
    """Behind the trainer's own refusals, where it refused."""
    judgement: Judgement
    seconds: float

    def text(self) -> str:
        """For people: what was set, and what came of it."""
        written = ", ".join(f"{name}={value}" for name, value in self.case.values.items() if value != UNSET)
        return f"{self.judgement.kind}: {self.case.id} {written}\n    {self.judgement.why}"

    def entry(self) -> dict[str, Any]:
        """What is kept."""
        verdict = self.verdict or Verdict()
        return {
            "id": self.case.id,
            "values": dict(self.case.values),
            "kind": self.judgement.kind,
            "why": self.judgement.why,
            "outcome": self.observation.outcome,
            "observed": self.observation.text()[:600],
            "not_compared": self.observation.not_compared,
            "refused_by": verdict.ids,
            "reason": next(iter(verdict.messages.values()), ""),
            "seconds": round(self.seconds, 2),
        }


def run_all(cases: Sequence[Case], material: Path, workers: int, done: Callable[[Result], None], stop: float = math.inf) -> None:
    """Every case, on as many gangs at a time; none is begun after `stop`, on the monotonic clock.

    `done` is called in turn, never twice at once.
    """
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    lock = threading.Lock()
    failed: list[BaseException] = []

    def work() -> None:
        pool = GangPool(BODY)
        try:
            while not failed and time.monotonic() < stop:
                result = run_case(waiting.get_nowait(), material, pool)
                with lock:
                    done(result)
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failed.append(error)
        finally:
            pool.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def run_case(case: Case, material: Path, pool: GangPool) -> Result:
    """One case; once more behind the trainer's own refusals where it refused, and once more where a gang was lost."""
    started = time.monotonic()
    observation, verdict = _asked(case, material, pool, ignores_own_refusals=False)
    if observation.hung:
        observation, again = _asked(case, material, pool, ignores_own_refusals=False)
        verdict = verdict or again
    if verdict is not None and verdict.refused and any(failure.is_own_refusal for failure in observation.failures):
        observation, _ = _asked(case, material, pool, ignores_own_refusals=True)
    return Result(case, verdict, observation, judged(verdict, observation, int(case.of("ranks"))), time.monotonic() - started)


def _asked(case: Case, material: Path, pool: GangPool, *, ignores_own_refusals: bool) -> tuple[Observation, Verdict | None]:
    directory = Path(tempfile.mkdtemp(prefix=f"{case.id}-", dir=material))
    try:
        answers = pool.ask(Request(dict(case.values), material, directory, ignores_own_refusals))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    heard = [answer for answer in answers if answer is not None]
    observations = [observation for observation, _ in heard]
    verdict = next((verdict for _, verdict in heard if verdict is not None), None)
    failures = [failure for observation in observations for failure in observation.failures]
    # What another rank sees of a failure is a closed connection.
    failures.sort(key=_is_echo)
    if failures and not _is_echo(failures[0]):
        return Observation(failures=tuple(failures), seconds=observations[0].seconds), verdict
    if len(heard) < len(answers) or failures:
        return Observation(hung=True, problems=tuple(failure.text for failure in failures)), verdict
    return observations[0], verdict


def _is_echo(failure: Failure) -> bool:
    return "Connection closed" in failure.text or "gloo" in failure.text.lower()
