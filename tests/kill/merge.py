"""`python -m tests.kill.merge`: merges that are killed at random moments until they are done end with the undisturbed ones'
bytes.

Half of the kills come at a random time, half just before or in the middle of a random system call on files. After some of them
the disk is made to look as after a power cut: what was never synced is garbage. After each kill the final name may not exist,
unless it holds everything.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig
from transformers import LlamaConfig

from finetune_trainer.merge import chunks, journal, stream, workspaces
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.merge.writer import journal_path, temporary_directory
from tests.support.source_seed import add_seed
from tests.unit.finetune_trainer.merge import tiny

MOST_KILLS = 4
MAX_SHARD_BYTES = 900_000
CHUNK_BYTES = 64 << 10
JOURNAL_BYTES = 20_000
"""Small enough that a run of megabytes has many chunks, and many records in its journal."""
LAST_CALLS = 40
"""Of a merge, in which all is written and nothing has its name yet, or has it just now."""
CALLS = ("open", "pwrite", "ftruncate", "fsync", "mkdir", "unlink", "rmdir", "rename")
"""Of the module os: all that change files, and those that make changes durable."""


@dataclass(frozen=True)
class Moment:
    """When a merge kills itself: after some seconds, or at a call; `torn`: in the middle of it, if it writes."""

    seconds: float | None = None
    call: int | None = None
    torn: bool = False


@dataclass
class Outcome:
    """How one disturbed merge went."""

    landed: Counter[str] = field(default_factory=Counter)
    """Kills by the call in which they came; `time` where the clock chose."""
    resumed: int = 0
    """Attempts that found finished bytes."""
    power_cuts: int = 0
    problem: str = ""


class Calls:
    """Counts calls of os functions in this process, and dies in one of them."""

    def __init__(self, moment: Moment, note: Path) -> None:
        self._moment = moment
        self._note = note
        self._numbers = itertools.count(1)
        self.last = 0
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.last = next(self._numbers)
            if self.last == self._moment.call:
                if name == "pwrite" and self._moment.torn:
                    descriptor, data, position = arguments
                    original(descriptor, bytes(memoryview(data)[: len(data) // 2]), position)
                self.die(name)
            return original(*arguments, **named)

        return call

    def die(self, where: str) -> None:
        self._note.write_text(where)
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # the signal ends this thread, too


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked process that does `work`; negative is a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def merge(options: MergeOptions, moment: Moment, note: Path) -> None:
    """One attempt, in its own process. Notes what was resumed and the number of calls."""
    chunks.CHUNK_BYTES = workspaces.CHUNK_BYTES = CHUNK_BYTES
    stream.JOURNAL_BYTES = JOURNAL_BYTES
    calls = Calls(moment, note)
    if moment.seconds is not None:
        timer = threading.Timer(moment.seconds, calls.die, ("time",))
        timer.daemon = True
        timer.start()
    report = merge_adapter(options)
    calls_made = calls.last
    note.write_text(json.dumps({"calls": calls_made, "resumed": report.bytes_resumed}))


def write_inputs(directory: Path) -> None:
    """A base of a few MB and an adapter with every kind of change that has rows or needs whole matrices."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=192, intermediate_size=700, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, max_position_embeddings=64,
    )  # fmt: skip
    base = tiny.save_base(directory / "base", config, torch.bfloat16)
    modules = ["q_proj", "v_proj", "up_proj", "down_proj", "embed_tokens"]
    tiny.save_adapter(
        directory / "adapter", base, LoraConfig(r=4, target_modules=modules, modules_to_save=["lm_head"], use_dora=True)
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def pull_the_plug(output: Path, random: Random) -> None:
    """Garbage where nothing was known to be durable: the worst that a power cut may leave."""
    path, directory = journal_path(output), temporary_directory(output)
    if not path.exists() or not directory.exists():
        return
    records, _ = journal._read_records(path)
    durable = {record["file"]: record["num_bytes"] for record in records[1:]}
    for file in directory.iterdir():
        first = durable.get(file.name, 0)
        with file.open("r+b") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(first)
            opened.write(random.randbytes(size - first))
    with path.open("ab") as opened:
        opened.write(random.choice((b"", b'0123456789abcdef {"file":"model', random.randbytes(50), b"\0" * 4096)))


def disturbed(inputs: Path, directory: Path, expected: dict[str, bytes], usual: tuple[float, int], random: Random) -> Outcome:
    """Merge with kills until it is done. usual: seconds and calls of an undisturbed merge."""
    outcome = Outcome()
    output, note = directory / "merged", directory / "note"
    options = MergeOptions(inputs / "base", (inputs / "adapter",), output, None, MAX_SHARD_BYTES)
    for attempt in range(MOST_KILLS + 1):
        moment = Moment()
        if attempt < MOST_KILLS:
            moment = _moment(random, usual)
        note.unlink(missing_ok=True)
        status = in_child(lambda moment=moment: merge(options, moment, note))
        if output.exists():
            found = contents(output)
            if found != expected:
                different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
                outcome.problem = f"attempt {attempt} (status {status}): {output} exists but {different} differ"
                return outcome
        elif status == 0:
            outcome.problem = f"attempt {attempt} said it was done, but there is no {output}"
            return outcome
        if status == 0:
            outcome.resumed += json.loads(note.read_text())["resumed"] > 0
            left = sorted(path.name for path in directory.iterdir() if path != note)
            if left != [output.name]:
                outcome.problem = f"after the last attempt there are {left}"
            return outcome
        if status != -signal.SIGKILL:
            outcome.problem = f"attempt {attempt} ended with status {status}"
            return outcome
        outcome.landed[note.read_text()] += 1
        if not output.exists() and random.random() < 0.4:
            outcome.power_cuts += 1
            pull_the_plug(output, random)
    outcome.problem = "the last attempt, which nobody disturbed, did not end"
    return outcome


def _moment(random: Random, usual: tuple[float, int]) -> Moment:
    seconds, num_calls = usual
    if random.random() < 0.5:
        return Moment(seconds=random.uniform(0, seconds))
    # Some of them among the few calls that give the output its name.
    first = 1 if random.random() < 0.7 else max(1, num_calls - LAST_CALLS)
    return Moment(call=random.randint(first, num_calls), torn=random.random() < 0.5)


def run(num_kills: int, seed: int, directory: Path) -> list[Outcome]:
    """Disturbed merges until `num_kills` kills have landed."""
    inputs = directory / "inputs"
    if in_child(lambda: write_inputs(inputs)) != 0:
        raise RuntimeError("base and adapter could not be written")
    output, note = directory / "undisturbed", directory / "note"
    options = MergeOptions(inputs / "base", (inputs / "adapter",), output, None, MAX_SHARD_BYTES)
    start = time.monotonic()
    if in_child(lambda: merge(options, Moment(), note)) != 0:
        raise RuntimeError("the undisturbed merge failed")
    usual = time.monotonic() - start, json.loads(note.read_text())["calls"]
    expected = contents(output)
    print(f"undisturbed: {len(expected)} files, {usual[1]} calls, {usual[0]:.2f} s", flush=True)
    outcomes: list[Outcome] = []
    while sum(sum(outcome.landed.values()) for outcome in outcomes) < num_kills:
        number = len(outcomes)
        place = directory / f"run-{number}"
        place.mkdir()
        outcomes.append(disturbed(inputs, place, expected, usual, Random(f"{seed}/{number}")))
        if outcomes[-1].problem:
            print(f"run {number}: {outcomes[-1].problem}; left in {place}", flush=True)
        else:
            shutil.rmtree(place)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print the figures; 1 where any run differed."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill.merge", description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="kills that have to land; each is followed by a resumed merge")
    add_seed(parser)
    arguments = parser.parse_args(argv)
    print(f"seed {arguments.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="kill-merge-"))
    start = time.monotonic()
    outcomes = run(arguments.runs, arguments.seed, directory)
    landed = sum((outcome.landed for outcome in outcomes), Counter[str]())
    failed = [outcome for outcome in outcomes if outcome.problem]
    print("kills by call: " + ", ".join(f"{name} {count}" for name, count in landed.most_common()))
    print(
        f"{landed.total()} kills in {len(outcomes)} merges, {sum(one.power_cuts for one in outcomes)} of them made a power cut, "
        f"{sum(outcome.resumed for outcome in outcomes)} ended from finished bytes; {len(outcomes) - len(failed)} identical; "
        f"{time.monotonic() - start:.0f} s"
    )
    if failed:
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
