"""`python -m tests.kill.publish_hub`: publications to the Hub that are killed until they are done show all of a release or
nothing.

Half of the kills come at a random time, half while a random request is on its way. Every commit that the repository ever had is
looked at afterwards, so no moment is missed. Run N of a seed is always killed in the same way, as far as the machine lets it.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

from finetune_job.api.base import HubPath
from finetune_trainer.network.environment import go_online
from finetune_trainer.publish.hub import HubDestination
from finetune_trainer.release.checksums import read_release
from finetune_trainer.release.files import Release
from finetune_trainer.release.write import write_release_files
from tests.support.hub import Fault, Hub, running_hub
from tests.support.hub_writes import FIRST_FILES, LARGE_BYTES
from tests.support.source_seed import add_seed
from tests.unit.finetune_trainer.release.example import example, write_weights

NAME, TOKEN = "team/tuned", "token-of-the-test"
MOST_KILLS = 4
MOST_REQUESTS = 45
"""Of one publication, about."""
SHARDS, SHARD_BYTES, PART_BYTES = 5, 150_000, 60_000
DEADLINE_SECONDS = 120.0


@dataclass
class Outcome:
    """How one disturbed publication went."""

    number: int
    landed: Counter[str] = field(default_factory=Counter)
    """Kills by the request in which they came; `time` where the clock chose, `late` where it was done by then."""
    problem: str = ""
    """Empty where readers saw nothing half done and it ended right."""


def release_of(claims: Path, seed: str) -> Release:
    """A complete release of several shards."""
    made = example(claims, {"output.destination": f"hf://{NAME}"})
    write_weights(made.context.output.merged, seed, shards=SHARDS if seed == "new" else SHARDS + 2, num_bytes=SHARD_BYTES)
    write_weights(made.context.output.adapter, seed, num_bytes=SHARD_BYTES)
    made.context.output.verification.write_text(f'{{"passed": true, "seed": "{seed}"}}\n')
    write_release_files(made.context.output, made.facts())
    return read_release(made.context)


def publish(release: Release, address: str) -> None:
    """In a process of its own."""
    os.environ["NO_PROXY"] = "127.0.0.1"
    go_online()
    HubDestination(HubPath(repository=NAME, path="", is_dataset=False), token=TOKEN, endpoint=address, private=True).publish(
        release
    )


def content(release: Release) -> dict[str, bytes]:
    return {file.name: file.local.read_bytes() for file in (*release.files, release.manifest)}


def disturbed(number: int, seed: int, older: Release, newer: Release, usual_seconds: float) -> Outcome:
    """Publish over nothing or over an older release, killed up to `MOST_KILLS` times, then once more to the end."""
    random, outcome = Random(f"{seed}/{number}"), Outcome(number)
    allowed = [FIRST_FILES]
    with running_hub() as hub:
        hub.writes.part_bytes = PART_BYTES
        if number % 2:
            _undisturbed(hub, older)
            allowed.append(content(older) | FIRST_FILES)
        before = len(allowed)
        for _ in range(random.randint(1, MOST_KILLS)):
            _killed(hub, newer, random, outcome, usual_seconds)
        stored = {sha256: len(kept) for sha256, kept in hub.writes.stored.items()}
        received = sum(hub.writes.received)
        if _attempt(hub, newer) != 0:
            outcome.problem = "the last attempt, which nobody disturbed, failed"
            return outcome
        allowed.append(content(newer) | FIRST_FILES)
        repository = hub.repositories["models", NAME]
        commits = [*repository.older.values(), repository.files]
        if any(files not in allowed for files in commits):
            outcome.problem = "a commit shows a part of a release"
        elif repository.files != allowed[-1]:
            outcome.problem = "the newest commit is not the release"
        elif len(commits) > before + 1:
            outcome.problem = f"{len(commits) - before} commits of the same release"
        missing = {file.sha256: file.size for file in (*newer.files, newer.manifest) if file.sha256 not in stored}
        if sum(hub.writes.received) - received > sum(size for size in missing.values() if size >= LARGE_BYTES):
            outcome.problem = outcome.problem or "what the Hub had already was sent again"
    return outcome


def _process(hub: Hub, release: Release) -> BaseProcess:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["finetune_trainer.publish.hub"])
    process = server.Process(target=publish, args=(release, hub.address))
    process.start()
    return process


def _attempt(hub: Hub, release: Release) -> int | None:
    process = _process(hub, release)
    process.join(DEADLINE_SECONDS)
    process.kill()
    process.join()
    return process.exitcode


def _undisturbed(hub: Hub, release: Release) -> None:
    code = _attempt(hub, release)
    if code != 0:
        raise AssertionError(f"a publication that nobody disturbed ended with {code}")


def _killed(hub: Hub, release: Release, random: Random, outcome: Outcome, usual_seconds: float) -> None:
    wanted = random.randint(1, MOST_REQUESTS)
    # One request decides, so it is hit more often than the others.
    at_commit, by_time = random.random() < 0.2, random.random() < 0.5
    seconds = random.uniform(0, usual_seconds)
    hits: list[str] = []
    lock, count = threading.Lock(), 0
    started = threading.Event()
    victim: list[BaseProcess] = []

    def strike() -> None:
        nonlocal count
        with lock:
            is_commit = "/commit/" in hub.requests[-1].path
            count += is_commit if at_commit else 1
            if by_time or count != (1 if at_commit else wanted) or (at_commit and not is_commit):
                return
        started.wait(DEADLINE_SECONDS)
        hits.append(_kind(hub.requests[-1].path))
        victim[0].kill()

    fault = Fault(1_000_000, before=strike)
    hub.fail("/", fault)
    victim.append(_process(hub, release))
    started.set()
    if by_time:
        victim[0].join(seconds)
        hits.append("time" if victim[0].is_alive() else "late")
        victim[0].kill()
    victim[0].join(DEADLINE_SECONDS)
    victim[0].kill()
    victim[0].join()
    fault.times = 0
    outcome.landed[hits[0] if hits else "late"] += 1


def _kind(path: str) -> str:
    for word in ("create", "validate", "preupload", "batch", "verify", "complete", "commit", "upload", "part", "tree", "resolve"):
        if word in path:
            return word
    return "look"


def run(runs: int, seed: int, first: int = 0) -> list[Outcome]:
    """That many disturbed publications, one after the other."""
    with tempfile.TemporaryDirectory(prefix="kill-hub-") as directory:
        older, newer = (release_of(Path(directory) / seed_of, seed_of) for seed_of in ("old", "new"))
        with running_hub() as hub:
            hub.writes.part_bytes = PART_BYTES
            _undisturbed(hub, newer)
            hub.repositories.clear()
            hub.writes.stored.clear()
            start = time.monotonic()
            _undisturbed(hub, newer)
            usual_seconds = time.monotonic() - start
        return [disturbed(number, seed, older, newer, usual_seconds) for number in range(first, first + runs)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print what was hit; 1 where any went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill.publish_hub", description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to repeat one")
    add_seed(parser)
    arguments = parser.parse_args(argv)
    print(f"seed {arguments.seed}", flush=True)
    start = time.monotonic()
    outcomes = run(arguments.runs, arguments.seed, arguments.first)
    landed = sum((outcome.landed for outcome in outcomes), Counter[str]())
    for outcome in outcomes:
        if outcome.problem:
            print(f"run {outcome.number}: {outcome.problem}; repeat: --seed {arguments.seed} --first {outcome.number} --runs 1")
    kills = sum(landed.values()) - landed["late"]
    right = sum(not outcome.problem for outcome in outcomes)
    print(f"{len(outcomes)} publications, {kills} kills, {right} right, {time.monotonic() - start:.0f} s")
    print(", ".join(f"{where}: {count}" for where, count in sorted(landed.items())))
    return int(right != len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
