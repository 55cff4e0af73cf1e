"""Runs cases on gangs and judges them, one line of JSON each."""

import math
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sweep.case import UNSET, Case
from tests.sweep.explanations import ABOUT_ADDED_ROWS
from tests.sweep.gangs import GangPool
from tests.sweep.judge import Judgement, judged, to_be_seen
from tests.sweep.mending import alternatives
from tests.sweep.observation import Failure, Observation, Verdict
from tests.sweep.peft_settings import trains_added_rows
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

    def entry(self, look: int = 1) -> dict[str, Any]:
        """What is kept. look: how often the case had been run then."""
        verdict = self.verdict or Verdict()
        return {
            "id": self.case.id,
            "look": look,
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
    """One case. What fails in another way than its refusals say is fixed as they say, to see whether each mistake is one."""
    started = time.monotonic()
    tried = _tried(case, material, pool)
    judgement = tried.judgement
    if judgement.kind == "unexplained" and tried.verdict is not None and tried.verdict.fields:
        judgement = _each_by_itself(case, tried.verdict, material, pool) or judgement
    if judgement.kind == "false refusal" and tried.verdict is not None and len(tried.verdict.ids) > 1:
        judgement = _hidden_by_another(case, tried.verdict, material, pool) or judgement
    return Result(case, tried.verdict, tried.observation, judgement, time.monotonic() - started)


@dataclass(frozen=True)
class _Tried:
    verdict: Verdict | None
    observation: Observation
    judgement: Judgement


def _tried(case: Case, material: Path, pool: GangPool) -> _Tried:
    """Once more behind the trainer's own refusals where it refused, and once more where a gang was lost."""
    observation, verdict = _asked(case, material, pool, ignores_own_refusals=False)
    if observation.hung:
        observation, again = _asked(case, material, pool, ignores_own_refusals=False)
        verdict = verdict or again
    if verdict is not None and verdict.refused and any(failure.is_own_refusal for failure in observation.failures):
        observation, _ = _asked(case, material, pool, ignores_own_refusals=True)
    judgement = judged(verdict, observation, int(case.of("ranks")))
    if verdict is not None and ABOUT_ADDED_ROWS & {*verdict.ids} and trains_added_rows(case):
        # Whatever the trainer makes of them: one that trains no row of an added token is refused by its own preflight.
        judgement = Judgement("false refusal", f"PEFT can train the rows of added tokens; {judgement.kind}: {judgement.why}")
    return _Tried(verdict, observation, judgement)


def _each_by_itself(case: Case, verdict: Verdict, material: Path, pool: GangPool) -> Judgement | None:
    """A case with two mistakes, of which the trainer meets the other one first; None where no change of its settings tells more.

    With the refused settings changed it either works, and what was refused made it fail, or it fails as the gates then say; and
    with the other mistake fixed, too, the first refusal is what is seen to happen.
    """
    for fixed, tried in _without(case, verdict, material, pool):
        kind, why = tried.judgement.kind, tried.judgement.why
        if kind == "accepted":
            return Judgement("refused", f"{', '.join(verdict.ids)}: works as {fixed.id}, where that is fixed")
        if kind == "false accept":
            return Judgement("false accept", f"as {fixed.id}, where {', '.join(verdict.ids)} is fixed: {why}")
        if kind not in ("refused", "policy") or tried.verdict is None:
            continue
        for _, again in _without(case, tried.verdict, material, pool):
            if again.judgement.kind in ("refused", "policy"):
                return Judgement("refused", f"two mistakes: {again.judgement.why}; and as {fixed.id}: {why}")
            if again.judgement.kind == "false refusal":
                return again.judgement
    return None


def _hidden_by_another(case: Case, verdict: Verdict, material: Path, pool: GangPool) -> Judgement | None:
    """A refused setting that names nothing, for instance, shows nothing: with the others fixed each refusal is what happens.

    None where one of them is not.
    """
    shown = {}
    for identifier in to_be_seen(verdict, int(case.of("ranks"))):
        others = {field for other in verdict.ids if other != identifier for field in verdict.fields.get(other, ())}
        for fixed in alternatives(case, others):
            tried = _tried(fixed, material, pool)
            left = set(tried.verdict.ids) & set(verdict.ids) if tried.verdict is not None else set()
            if left == {identifier} and tried.judgement.kind == "refused":
                shown[identifier] = f"as {fixed.id}: {tried.judgement.why}"
                break
        else:
            return None
    return Judgement("refused", "; ".join(shown.values()))


def _without(case: Case, verdict: Verdict, material: Path, pool: GangPool) -> Iterator[tuple[Case, _Tried]]:
    """The case with what these findings name changed, as far as they are gone then."""
    fields = {field for identifier in verdict.ids for field in verdict.fields.get(identifier, ())}
    for fixed in alternatives(case, fields):
        tried = _tried(fixed, material, pool)
        if tried.verdict is not None and not set(tried.verdict.ids) & set(verdict.ids):
            yield fixed, tried


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
