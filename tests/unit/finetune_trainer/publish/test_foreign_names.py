"""Whoever can write to the workspace is not the one whose credentials the pod holds: what it names is neither read nor sent."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from finetune_job.api.base import RegistryPath
from finetune_trainer.context import RunContext
from finetune_trainer.errors import CheckpointError, TrainerError
from finetune_trainer.network.retry import RetryPolicy
from finetune_trainer.publish.oci import RegistryDestination
from finetune_trainer.publish.resumable import ProvenReader, UploadJournal
from finetune_trainer.release.checksums import read_release
from tests.support.finished_run import finished_run
from tests.unit.finetune_trainer.publish.test_registry import Request, Server, served

SECRET = b'{"auths": {"registry.example": {"auth": "canary-that-sings"}}}'
SECRET_SHA256 = hashlib.sha256(SECRET).hexdigest()
WEIGHTS = "merged/model-00001-of-00002.safetensors"
PATIENCE_SECONDS = 60.0


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Takes everything and has nothing."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        match request.method:
            case "HEAD":
                return 404, {}, b""
            case "POST" | "PATCH":
                return 202, {"Location": "/v2/team/model/blobs/uploads/1"}, b""
            case "GET":
                return 204, {"Range": "0-0"}, b""
        return 201, {}, b""

    with ExitStack() as stack:
        server = served(stack)
        server.answer = answer
        yield server


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Where the kubelet puts logins, outside the claims."""
    path = tmp_path / "credentials" / "registry" / "config.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return finished_run(tmp_path, "oci://registry.example/team/model:v1")


def publish(context: RunContext, registry: Server) -> None:
    place = RegistryPath(registry=registry.address.removeprefix("http://"), repository="team/model", tag="v1")
    journal = UploadJournal(context.workspace.publication)
    patience = RetryPolicy(attempts=1, first_seconds=0.01, longest_seconds=0.01)
    RegistryDestination(place, None, journal, threading.Event(), plain_http=True, patience=patience).publish(
        read_release(context)
    )


def refusal(context: RunContext, registry: Server) -> str:
    """What is said, which holds nothing of the secret; nor was anything sent."""
    with pytest.raises(TrainerError) as caught:
        publish(context, registry)
    said = f"{caught.value}; {caught.value.hint}"
    sent = b"".join(request.body for request in registry.seen)
    for part in (b"canary", SECRET_SHA256.encode()):
        assert part not in sent
        assert part not in said.encode()
    return said


def named(context: RunContext, name: str, sha256: str = SECRET_SHA256) -> None:
    """Add a line to SHA256SUMS."""
    with context.output.checksums.open("a") as file:
        file.write(f"{sha256}  {name}\n")


def from_results(context: RunContext, path: Path) -> str:
    return os.path.relpath(path, context.output.merged)


def test_untouched_results_are_published(context, registry):
    publish(context, registry)
    assert sum(len(request.body) for request in registry.seen if request.method == "PATCH") > 8000


@pytest.mark.parametrize("sha256", [SECRET_SHA256, "0" * 64])
@pytest.mark.parametrize(
    "name_of",
    [
        from_results,
        lambda context, path: f"adapter/../{os.path.relpath(path, context.output.root)}",
        lambda _, path: str(path),
        lambda _, path: f"./{path}",
    ],
    ids=["upwards", "through a directory", "absolute", "absolute below a dot"],
)
def test_a_name_that_leaves_the_results_is_refused(context, registry, secret, name_of, sha256):
    named(context, name_of(context, secret), sha256)
    said = refusal(context, registry)
    assert "SHA256SUMS names" in said
    assert "Nothing was read or sent" in said
    assert "find out who writes to the claim" in said
    assert registry.seen == []


def link_to_file(context: RunContext, secret: Path) -> None:
    (context.output.merged / "config.json").unlink()
    (context.output.merged / "config.json").symlink_to(secret)
    named(context, "config.json")


def link_to_directory(context: RunContext, secret: Path) -> None:
    (context.output.adapter / "registry").symlink_to(secret.parent, target_is_directory=True)
    named(context, "adapter/registry/config.json")


def link_of_results(context: RunContext, secret: Path) -> None:
    """The results themselves: everything below is as it was, elsewhere."""
    moved = secret.parent / "results"
    context.output.root.rename(moved)
    (moved / "merged" / "x.json").write_bytes(SECRET)
    context.output.root.symlink_to(moved, target_is_directory=True)


def link_of_sums(context: RunContext, secret: Path) -> None:
    context.output.checksums.unlink()
    context.output.checksums.symlink_to(secret)


def make_pipe(path: Path) -> None:
    """Who opens it for reading waits for ever; here, so that no test does, only until somebody opens the other end."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    def release() -> None:
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    timer = threading.Timer(PATIENCE_SECONDS, release)
    timer.daemon = True
    timer.start()


def pipe(context: RunContext, _: Path) -> None:
    make_pipe(context.output.merged / "config.json")


def pipe_of_sums(context: RunContext, _: Path) -> None:
    make_pipe(context.output.checksums)


def pipe_of_journal(context: RunContext, _: Path) -> None:
    make_pipe(context.workspace.publication)


def link_of_journal(context: RunContext, secret: Path) -> None:
    context.workspace.publication.symlink_to(secret)


@pytest.mark.parametrize(
    "attack",
    [link_to_file, link_to_directory, link_of_results, link_of_sums, pipe, pipe_of_sums, pipe_of_journal, link_of_journal],
)
def test_links_and_pipes_are_refused_and_never_followed(context, registry, secret, attack: Callable[[RunContext, Path], None]):
    attack(context, secret)
    started = time.monotonic()
    refusal(context, registry)
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert registry.seen == []


def test_a_file_that_becomes_a_link_after_it_was_listed_is_not_read(context, secret):
    release = read_release(context)
    path = context.claims_root / context.plan.output.claim / release.files[0].path
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(CheckpointError, match="link"):
        ProvenReader(release.files[0])


def test_bytes_that_are_not_those_of_the_release_are_not_sent_at_all(context, registry):
    """An upload is at its destination before it is complete, so a refusal at its end is too late."""
    path = context.output.root / WEIGHTS
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert "sha256 is no longer" in refusal(context, registry)
    assert not any(request.body.startswith(b"?") for request in registry.seen)


def test_the_journal_cannot_send_the_pod_to_another_address(context, registry):
    with ExitStack() as stack:
        inner = served(stack)
        journal = UploadJournal(context.workspace.publication)
        for file in read_release(context).files:
            journal.remember(f"sha256:{file.sha256}", f"{inner.address}/admin")
        publish(context, registry)
        assert inner.seen == []
