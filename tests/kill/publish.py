"""`python -m tests.kill.publish`: publications that are killed again and again end like undisturbed ones.

The role runs as a process of its own against real servers. A proxy between them sends SIGKILL at a random moment of a random
request: when it arrives, when half of its body has passed (where it has none: at its end), or when the server has answered and
the client does not know it. After each kill a reader looks: SHA256SUMS, or the tag, may be there only if everything is. Run N of
a seed is killed at the same places each time.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from finetune_trainer.context import RunContext
from tests.support.faulty_proxy import FaultyProxy, Moment, running_proxy
from tests.support.finished_run import finished_run, publish_arguments, published_files
from tests.support.registry import NotThereError, Registry, running_registry
from tests.support.source_seed import add_seed
from tools.cluster.binaries import ensure_binaries
from tools.cluster.processes import without_proxies
from tools.s3 import REGION, S3Server, running_s3

WEIGHT_BYTES = (36_000_000, 100_000)
"""Three parts or chunks, and one."""
MOST_KILLS = 4
"""Of one run; the attempt after the last one is left alone."""
DEADLINE_SECONDS = 300.0
_CHECKSUMS = "SHA256SUMS"
_BUCKET = "out"


@dataclass
class Kind:
    """One kind of destination."""

    name: str
    proxy: FaultyProxy
    destination: Callable[[str], str]
    """By the name of a run."""
    settings: dict[str, Any]
    """Of the profile's publish section."""
    visible: Callable[[str], dict[str, bytes] | None]
    """What a reader sees of a run; None: it shows as not complete. Raises where it shows as complete and is not."""
    leftovers: Callable[[str], str]
    """What a finished publication left besides; empty for nothing."""
    requests: int = 0
    """Of an undisturbed publication."""


@dataclass
class Outcome:
    """How one run ended."""

    name: str
    landed: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    problem: str = ""


@contextmanager
def kinds(directory: Path, credentials: Path) -> Iterator[list[Kind]]:
    """Both kinds with their servers."""
    with ExitStack() as stack:
        registry = stack.enter_context(running_registry(directory / "registry", needs_login=True))
        s3 = stack.enter_context(running_s3(ensure_binaries().versitygw, directory / "s3"))
        s3.make_bucket(_BUCKET)
        before_registry = stack.enter_context(running_proxy(registry.host))
        before_s3 = stack.enter_context(running_proxy(s3.address.removeprefix("http://")))
        for folder, files in {
            "registry": {"config.json": registry.docker_config(before_registry.host)},
            "s3": s3.environment(),
        }.items():
            (credentials / folder).mkdir(parents=True)
            for name, value in files.items():
                (credentials / folder / name).write_text(value)
        yield [
            Kind(
                "oci",
                before_registry,
                lambda name: f"oci://{before_registry.host}/team/{name}:v1",
                {"plain_http_registries": [before_registry.host]},
                lambda name: _visible_artifact(registry, f"team/{name}"),
                lambda _: "",
            ),
            Kind(
                "s3",
                before_s3,
                lambda name: f"s3://{_BUCKET}/results/{name}",
                {"s3_endpoint": before_s3.address, "s3_region": REGION},
                lambda name: _visible_objects(s3, f"results/{name}"),
                lambda name: _unfinished_uploads(s3, f"results/{name}"),
            ),
        ]


def _visible_artifact(registry: Registry, repository: str) -> dict[str, bytes] | None:
    try:
        digest = registry.digest(repository, "v1")
    except NotThereError:
        return None
    try:
        return registry.pull(repository, digest)
    except NotThereError as error:
        raise AssertionError(f"the tag names a manifest whose {error} is missing") from None


def _visible_objects(s3: S3Server, prefix: str) -> dict[str, bytes] | None:
    """Everything below the prefix, if SHA256SUMS is there."""
    files = s3.objects(_BUCKET, prefix)
    if _CHECKSUMS not in files:
        return None
    named = {line.split("  ", 1)[1] for line in files[_CHECKSUMS].decode().splitlines()}
    if not named <= set(files):
        raise AssertionError(f"{_CHECKSUMS} names {sorted(named - set(files))}, which are missing")
    return files


def _unfinished_uploads(s3: S3Server, prefix: str) -> str:
    answer = s3.client().list_multipart_uploads(Bucket=_BUCKET, Prefix=f"{prefix}/")
    left = [(upload["Key"], upload["UploadId"]) for upload in answer.get("Uploads", ())]
    return f"uploads are left: {left}" if left else ""


def disturbed(kind: Kind, name: str, directory: Path, credentials: Path, random: Random) -> Outcome:
    """Kill the publication up to MOST_KILLS times, then let it finish; looked at by a reader after each attempt."""
    outcome = Outcome(name)
    context = finished_run(directory, kind.destination(name), weight_bytes=WEIGHT_BYTES, seed=name, **kind.settings)
    expected = published_files(context)
    for attempt in range(MOST_KILLS + 1):
        moment = None
        if attempt < random.randint(1, MOST_KILLS):
            moment = (random.randrange(kind.requests), random.choice(list(Moment)))
        code, hit = _attempt(kind, context, directory, credentials, moment)
        outcome.story.append(f"attempt {attempt}: {moment or 'undisturbed'}, ended with {code}")
        try:
            seen = kind.visible(name)
        except (AssertionError, ValueError) as error:
            outcome.problem = str(error)
            return outcome
        if seen is not None and seen != expected:
            outcome.problem = f"a reader sees other bytes: {sorted(key for key in expected if seen.get(key) != expected[key])}"
        elif code == 0 and seen is None:
            outcome.problem = "the publication says that it is done, and a reader sees nothing"
        elif code == 0:
            outcome.problem = kind.leftovers(name) or ("the journal is left" if context.workspace.publication.exists() else "")
        elif hit is None:
            outcome.problem = f"ended with {code}, see {directory / 'log'}"
        if hit is not None:
            outcome.landed[hit.value] += 1
        if outcome.problem or code == 0:
            return outcome
    outcome.problem = f"not done after {MOST_KILLS + 1} attempts"
    return outcome


def _attempt(
    kind: Kind, context: RunContext, directory: Path, credentials: Path, moment: tuple[int, Moment] | None
) -> tuple[int, Moment | None]:
    """Exit code, and the moment at which the kill came, if it came before the end."""
    hits: list[Moment] = []
    # Where a killed one leaves what it was signing.
    scratch = directory / "scratch"
    scratch.mkdir(exist_ok=True)
    with (directory / "log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune_trainer", *publish_arguments(context, directory, credentials)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**without_proxies(os.environ), "TMPDIR": str(scratch)},
        )
    try:

        def watch(number: int, reached: Moment) -> None:
            # Bodies are small or none for most requests; for them half is the end.
            if moment is not None and number == moment[0] and reached in (moment[1], Moment.DONE) and not hits:
                hits.append(reached)
                process.kill()

        kind.proxy.seen.clear()
        kind.proxy.watch = watch
        code = process.wait(DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()
    return code, hits[0] if hits else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print what was hit; 1 where any run went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill.publish", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="that have to land, for each kind of destination")
    add_seed(parser)
    arguments = parser.parse_args(argv)
    print(f"seed {arguments.seed}", flush=True)
    start, failed = time.monotonic(), False
    directory = Path(tempfile.mkdtemp(prefix="kill-publish-"))
    with kinds(directory, directory / "credentials") as all_kinds:
        for kind in all_kinds:
            failed |= not _run_kind(kind, directory, arguments.seed, arguments.kills)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")
    if failed:
        print(f"what the failed runs left: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


def _run_kind(kind: Kind, directory: Path, seed: int, kills: int) -> bool:
    credentials, landed, runs, failures = directory / "credentials", Counter[str](), 0, 0
    context = finished_run(directory / f"{kind.name}-base", kind.destination("base"), weight_bytes=WEIGHT_BYTES, **kind.settings)
    code, _ = _attempt(kind, context, directory / f"{kind.name}-base", credentials, None)
    if code != 0 or kind.visible("base") != published_files(context):
        print(f"{kind.name}: the undisturbed publication failed, see {directory / f'{kind.name}-base' / 'log'}")
        return False
    kind.requests = len(kind.proxy.seen)
    while landed.total() < kills:
        name = f"run-{runs}"
        outcome = disturbed(kind, name, directory / f"{kind.name}-{name}", credentials, Random(f"{seed}/{kind.name}/{runs}"))
        landed += outcome.landed
        runs += 1
        if outcome.problem:
            failures += 1
            print(f"{kind.name} {name}: {outcome.problem}\n  " + "\n  ".join(outcome.story), flush=True)
        else:
            shutil.rmtree(directory / f"{kind.name}-{name}")
    moments = ", ".join(f"{landed[moment.value]} {moment.value}" for moment in Moment)
    print(
        f"{kind.name}: {landed.total()} kills in {runs} publications of {kind.requests} requests ({moments}); {failures} failed",
        flush=True,
    )
    return failures == 0


if __name__ == "__main__":
    sys.exit(main())
