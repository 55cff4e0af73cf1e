"""The publish role against real servers, an OCI registry and an S3 server, undisturbed and with faults in between."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from finetune_job.failures import EXIT_CODES, FailureClass, parse_envelope
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.errors import CheckpointError, DestinationRefusedError, DestinationUnavailableError, TrainerError
from finetune_trainer.network.retry import RetryPolicy
from finetune_trainer.publish import oci as oci_module
from finetune_trainer.publish import s3 as s3_module
from finetune_trainer.publish.oci import CHUNK_BYTES
from finetune_trainer.publish.s3 import PART_BYTES
from finetune_trainer.publish.s3_client import Bucket, ExistsError
from finetune_trainer.roles.publish import publish
from tests.support.documented import ROOT, as_written, blocks_of
from tests.support.faulty_proxy import FaultyProxy, Moment, running_proxy
from tests.support.finished_run import finished_run, publish_arguments, published_files
from tests.support.registry import PASSWORD, NotThereError, Registry, running_registry
from tools.cluster.binaries import ensure_binaries
from tools.cluster.processes import without_proxies
from tools.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server, running_s3

QUICK = RetryPolicy(attempts=3, first_seconds=0.01, longest_seconds=0.02, longest_retry_after_seconds=1.0)
PIECE_BYTES = 5 * 1024**2
"""Of a part or chunk in these tests; no less is a part to an object store."""
LARGE, TRULY_LARGE = (12_500_000, 3000), (40_000_000, 3000)
"""Three parts or chunks, and one: of these tests, and of the product."""
BUCKET = "out"
KINDS = ("oci", "s3")
CHUNK_LINE = {"oci": "PATCH ", "s3": "partNumber="}
"""What the requests that send a piece of a large file have in their lines."""
LAST_LINE: dict[str, Callable[[RunContext], str]] = {
    "oci": lambda context: "PUT /v2/" + destination_of(context).split("/", 3)[3].replace(":v1", "/manifests/v1"),
    "s3": lambda context: f"PUT /{destination_of(context).removeprefix('s3://')}/SHA256SUMS",
}
"""The request that makes a release visible."""


@dataclass
class Place:
    """One kind of destination behind its proxy."""

    kind: str
    proxy: FaultyProxy
    credentials: Path
    context: Callable[..., RunContext]
    """By the name of a result."""
    visible: Callable[[str], dict[str, bytes] | None]
    """What a reader sees of it."""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry"), needs_login=True) as running:
        yield running


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3(ensure_binaries().versitygw, tmp_path_factory.mktemp("s3")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def open_place(
    registry: Registry, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Place]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ExitStack() as stack:

        def open_(kind: str) -> Place:
            server = registry.host if kind == "oci" else s3.address.removeprefix("http://")
            proxy = stack.enter_context(running_proxy(server))
            credentials = tmp_path / "credentials"
            # Each test has results of its own on the servers.
            names = {"oci": f"team/{tmp_path.name.lower().replace('_', '-')}", "s3": f"results/{tmp_path.name}"}
            name = names[kind]
            if kind == "oci":
                write(credentials / "registry/config.json", registry.docker_config(proxy.host))

                def context(folder: str = "run", tag: str = "v1", **more: object) -> RunContext:
                    address = f"oci://{proxy.host}/{name}:{tag}"
                    return finished_run(tmp_path / folder, address, plain_http_registries=[proxy.host], **more)  # type: ignore[arg-type]
            else:
                for variable, value in s3.environment().items():
                    write(credentials / "s3" / variable, value)

                def context(folder: str = "run", tag: str = "v1", **more: object) -> RunContext:
                    address = f"s3://{BUCKET}/{name}/{tag}"
                    settings = {"s3_endpoint": proxy.address, "s3_region": REGION}
                    return finished_run(tmp_path / folder, address, **settings, **more)  # type: ignore[arg-type]

            see = (
                (lambda tag: artifact(registry, name, tag))
                if kind == "oci"
                else (lambda tag: s3.objects(BUCKET, f"{name}/{tag}"))
            )
            return Place(kind, proxy, credentials, context, see)

        yield open_


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, open_place: Callable[[str], Place]) -> Place:
    return open_place(request.param)


def destination_of(context: RunContext) -> str:
    assert context.plan.publish is not None
    return context.plan.publish.destination


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def artifact(registry: Registry, repository: str, tag: str) -> dict[str, bytes] | None:
    try:
        digest = registry.digest(repository, tag)
    except NotThereError:
        return None
    return registry.pull(repository, digest)


def test_signed_results_are_verified_by_the_documented_commands(place: Place, tmp_path: Path) -> None:
    key, public = tmp_path / "signing.key", tmp_path / "signing.pub"
    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    subprocess.run(["openssl", "genpkey", *curve, "-out", key], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    write(place.credentials / "signing/key", key.read_text())
    context = place.context()
    publish(context, Credentials(place.credentials), QUICK)
    # Killed and run again: the same bytes, which a tag that names them takes.
    publish(context, Credentials(place.credentials), QUICK)

    seen = place.visible("v1")
    assert seen is not None
    assert seen.keys() == published_files(context).keys() | {"SHA256SUMS.sig"}
    folder = tmp_path / "copy"
    for name, content in seen.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (lines,) = [block for block in blocks_of(ROOT / "docs/how-to/results.md") if block.text.startswith("base64 -d SHA256SUMS")]
    script = ["sh", "-ec", as_written(lines, {"signing.pub": str(public)})]
    good = subprocess.run(script, cwd=folder, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, "Verified OK\n")
    (folder / "provenance.json").write_bytes(b"{}")
    assert subprocess.run(script, cwd=folder, capture_output=True, check=False).returncode != 0


def is_complete(seen: dict[str, bytes] | None) -> bool:
    """As a reader of this kind of destination tells."""
    return seen is not None and "SHA256SUMS" in seen


def brought(place: Place, context: RunContext, patience: RetryPolicy = QUICK) -> dict[str, str]:
    return dict(publish(context, Credentials(place.credentials), patience).facts)


def failure(place: Place, context: RunContext) -> TrainerError:
    with pytest.raises(TrainerError) as caught:
        publish(context, Credentials(place.credentials), QUICK)
    return caught.value


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci_module, "CHUNK_BYTES", PIECE_BYTES)
    monkeypatch.setattr(s3_module, "PART_BYTES", PIECE_BYTES)


@pytest.fixture
def pieces_of_the_product(monkeypatch: pytest.MonkeyPatch, small_pieces: None) -> None:
    monkeypatch.setattr(oci_module, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(s3_module, "PART_BYTES", PART_BYTES)


@pytest.mark.usefixtures("pieces_of_the_product")
@pytest.mark.parametrize("weight_bytes", [(5000, 3000), TRULY_LARGE, (PART_BYTES, CHUNK_BYTES + 1)])
def test_a_release_arrives_byte_for_byte_and_once(place: Place, weight_bytes: tuple[int, int]) -> None:
    context = place.context(weight_bytes=weight_bytes)
    facts = brought(place, context)
    assert place.visible("v1") == published_files(context)
    assert int(facts["bytes"]) == sum(map(len, published_files(context).values()))
    assert facts["digest"].removeprefix("sha256:") in facts["address"]
    assert not context.workspace.publication.exists()
    again = brought(place, context)
    assert (again["bytes_sent"], again["digest"], again["address"]) == ("0", facts["digest"], facts["address"])


def test_an_artifact_is_readable_by_its_digest(open_place: Callable[[str], Place], registry: Registry) -> None:
    place = open_place("oci")
    context = place.context()
    address = brought(place, context)["address"]
    name, _, digest = address.partition("@")
    repository = name.removeprefix(f"oci://{place.proxy.host}/").rpartition(":")[0]
    assert registry.pull(repository, digest) == published_files(context)
    assert registry.manifest(repository, "v1")["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"


def test_a_place_that_holds_another_release_is_refused_and_left_alone(place: Place) -> None:
    first = place.context("first")
    brought(place, first)
    error = failure(place, place.context("second", seed="other"))
    assert error.failure is FailureClass.DESTINATION_REFUSED
    assert "spec.output.destination" in str(error)
    assert place.visible("v1") == published_files(first)


def test_the_tag_latest_moves_and_the_older_result_keeps_its_digest(
    open_place: Callable[[str], Place], registry: Registry
) -> None:
    place = open_place("oci")
    first, second = place.context("first", tag="latest"), place.context("second", tag="latest", seed="other")
    digest = brought(place, first)["digest"]
    brought(place, second)
    assert place.visible("latest") == published_files(second)
    repository = destination_of(first).removeprefix(f"oci://{place.proxy.host}/").rpartition(":")[0]
    assert registry.pull(repository, digest) == published_files(first)


@pytest.mark.parametrize(("key", "words"), [("notes.txt", "notes.txt"), ("merged/config.json", "another merged/config.json")])
def test_objects_of_somebody_else_are_refused(open_place: Callable[[str], Place], s3: S3Server, key: str, words: str) -> None:
    place = open_place("s3")
    context = place.context()
    prefix = destination_of(context).removeprefix(f"s3://{BUCKET}/")
    s3.upload(BUCKET, {f"{prefix}/{key}": b"somebody's"})
    # Another prefix that begins alike is none of ours.
    s3.upload(BUCKET, {f"{prefix}-other/SHA256SUMS": b"x"})
    error = failure(place, context)
    assert error.failure is FailureClass.DESTINATION_REFUSED
    assert words in str(error)
    assert place.visible("v1")[key] == b"somebody's"  # type: ignore[index]
    assert not is_complete(place.visible("v1"))


def test_a_real_store_refuses_to_overwrite_what_came_meanwhile(s3: S3Server) -> None:
    bucket, key = Bucket(s3.client(), BUCKET, threading.Event(), RetryPolicy(), signed=True), "meanwhile/model.safetensors"
    upload = bucket.create_upload(key, "0")
    tags = {1: bucket.upload_part(key, upload, 1, b"of the slow one")}
    bucket.put(key, b"of the fast one", "1")
    for write in (lambda: bucket.complete_upload(key, upload, tags), lambda: bucket.put(key, b"of the slow one", "0")):
        with pytest.raises(ExistsError):
            write()
    assert bucket.get(key, 100) == b"of the fast one"
    bucket.abort_upload(key, upload)


@pytest.mark.parametrize(
    ("status", "headers", "cut_at"),
    [
        pytest.param(500, {}, None, marks=pytest.mark.nightly),
        (503, {}, None),
        (429, {"Retry-After": "0"}, None),
        pytest.param(None, {}, Moment.ARRIVED, marks=pytest.mark.nightly),
        (None, {}, Moment.HALF),
        pytest.param(None, {}, Moment.DONE, marks=pytest.mark.nightly),
    ],
)
def test_faults_that_pass_are_waited_for(
    place: Place, status: int | None, headers: dict[str, str], cut_at: Moment | None, caplog: pytest.LogCaptureFixture
) -> None:
    context = place.context(weight_bytes=LARGE)
    # Every kind of request meets it once, and the large ones twice.
    chunk, last = CHUNK_LINE[place.kind], LAST_LINE[place.kind](context)
    for line in (last, "HEAD ", "GET ", "POST ", "PUT ", "PATCH ", chunk, chunk):
        place.proxy.fail(line, status=status, headers=headers, cut_at=cut_at)
    caplog.set_level("WARNING")
    # Files are sent at the same time: all faults may meet the same one, in a row.
    brought(place, context, replace(QUICK, attempts=len(place.proxy.faults) + 1))
    assert place.visible("v1") == published_files(context)
    assert place.proxy.faults[0].times == 0
    assert sum(fault.times == 0 for fault in place.proxy.faults) >= len(place.proxy.faults) - 2
    assert PASSWORD not in caplog.text
    assert SECRET_KEY not in caplog.text


@pytest.mark.parametrize(
    ("status", "headers", "cut_at", "words"),
    [
        (503, {}, None, "HTTP status 503"),
        (429, {"Retry-After": "3600"}, None, "HTTP status 429"),
        (None, {}, Moment.HALF, ""),
        *(pytest.param(None, {}, moment, "", marks=pytest.mark.nightly) for moment in (Moment.ARRIVED, Moment.DONE)),
    ],
)
def test_a_destination_that_stays_broken_ends_the_attempt_and_the_next_one_sends_what_is_missing(
    place: Place, status: int | None, headers: dict[str, str], cut_at: Moment | None, words: str
) -> None:
    context = place.context(weight_bytes=LARGE)
    line = CHUNK_LINE[place.kind] if cut_at else LAST_LINE[place.kind](context)
    place.proxy.fail(line, 99, status=status, headers=headers, cut_at=cut_at)
    error = failure(place, context)
    assert isinstance(error, DestinationUnavailableError)
    assert words in str(error)
    assert not is_complete(place.visible("v1"))
    place.proxy.faults.clear()
    sent = int(brought(place, context)["bytes_sent"])
    assert cut_at or sent < PIECE_BYTES
    assert place.visible("v1") == published_files(context)


def test_an_upload_goes_on_where_it_was_broken_off(place: Place) -> None:
    context = place.context(weight_bytes=LARGE)
    # Refused on arrival, so that the registry knows of no half chunk.
    if place.kind == "oci":
        place.proxy.fail(CHUNK_LINE["oci"], 99, content_range=f"{2 * PIECE_BYTES}-", status=503)
    else:
        place.proxy.fail("partNumber=3", 99, status=503)
    failure(place, context)
    assert context.workspace.publication.exists()
    place.proxy.faults.clear()
    sent = int(brought(place, context)["bytes_sent"])
    assert sent < LARGE[0] - 2 * PIECE_BYTES + 100_000  # the last part, and what is small
    assert place.visible("v1") == published_files(context)


def test_an_upload_that_nobody_remembers_is_ended(open_place: Callable[[str], Place]) -> None:
    place = open_place("s3")
    context = place.context(weight_bytes=LARGE)
    place.proxy.fail(CHUNK_LINE["s3"], 99, status=503)
    failure(place, context)
    context.workspace.publication.unlink()
    place.proxy.faults.clear()
    brought(place, context)
    assert sum("DELETE " in seen.line and "uploadId=" in seen.line for seen in place.proxy.seen) == 1
    assert place.visible("v1") == published_files(context)


@pytest.mark.parametrize("name", ["merged/model-00001-of-00002.safetensors", "merged/tokenizer.json", "README.md"])
def test_a_file_that_changed_since_the_merge_is_not_published(place: Place, name: str) -> None:
    context = place.context(weight_bytes=LARGE)
    path = context.output.root / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=name):
        publish(context, Credentials(place.credentials), QUICK)
    assert not is_complete(place.visible("v1"))
    path.write_bytes(content)
    brought(place, context)
    assert place.visible("v1") == published_files(context)


def test_wrong_and_missing_credentials_name_the_field(place: Place, tmp_path: Path, registry: Registry) -> None:
    context, empty = place.context(), tmp_path / "no-credentials"
    empty.mkdir()
    place.credentials = empty
    error = failure(place, context)
    assert isinstance(error, DestinationRefusedError)
    assert "name a Secret with" in error.hint
    wrong = replace(registry, login=("publisher", "canary-that-sings"))
    write(empty / "registry/config.json", wrong.docker_config(place.proxy.host))
    write(empty / "s3/AWS_ACCESS_KEY_ID", ACCESS_KEY)
    write(empty / "s3/AWS_SECRET_ACCESS_KEY", "canary-that-sings")
    error = failure(place, context)
    assert isinstance(error, DestinationRefusedError)
    assert "spec.output.secretRef" in error.hint
    assert "canary-that-sings" not in f"{error!r}{error.hint}"


def test_a_bucket_that_does_not_exist_is_named(open_place: Callable[[str], Place], tmp_path: Path) -> None:
    place = open_place("s3")
    settings = {"s3_endpoint": place.proxy.address, "s3_region": REGION}
    error = failure(place, finished_run(tmp_path / "nowhere", "s3://no-such-bucket/x", **settings))
    assert isinstance(error, DestinationRefusedError)
    assert "no-such-bucket" in str(error)
    assert "spec.output.destination" in f"{error}{error.hint}"


def test_a_full_destination_is_said(place: Place) -> None:
    place.proxy.fail(CHUNK_LINE[place.kind], 9, status=413)
    error = failure(place, place.context(weight_bytes=LARGE))
    assert isinstance(error, DestinationRefusedError)
    assert "no room" in str(error)


def start(place: Place, context: RunContext, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "finetune_trainer", *publish_arguments(context, directory, place.credentials)],
        env=without_proxies(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("is_refused", [False, True])
def test_no_secret_shows_anywhere(place: Place, tmp_path: Path, is_refused: bool) -> None:
    context, shown = place.context(), []
    secrets = (
        [PASSWORD, json.loads((place.credentials / "registry/config.json").read_text())["auths"][place.proxy.host]["auth"]]
        if (place.kind == "oci")
        else [SECRET_KEY]
    )
    if is_refused:
        # As stores answer: with the string that was signed, and what it was signed with.
        says = {
            "oci": json.dumps({"errors": [{"code": "DENIED", "message": f"{secrets[0]} may not", "detail": secrets[0]}]}),
            "s3": f"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>{secrets[0]}</StringToSign></Error>",
        }[place.kind]
        place.proxy.fail(LAST_LINE[place.kind](context), 99, status=403, body=says.encode())
    process: list[subprocess.Popen[str]] = []
    started = threading.Event()

    def watch(_number: int, _moment: Moment) -> None:
        started.wait(60)
        for name in ("cmdline", "environ"):
            shown.append(Path(f"/proc/{process[0].pid}/{name}").read_text(errors="replace"))

    place.proxy.watch = watch
    process.append(start(place, context, tmp_path / "run"))
    started.set()
    output, _ = process[0].communicate(timeout=120)
    expected = EXIT_CODES[FailureClass.DESTINATION_REFUSED] if is_refused else 0
    assert process[0].returncode == expected, output
    assert len(shown) > 1
    shown.append(output)
    shown += [path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    if is_refused:
        assert "spec.output.secretRef" in parse_envelope((tmp_path / "run/termination.json").read_text()).hint
    for secret in secrets:
        assert not [text for text in shown if secret in text]


@pytest.mark.usefixtures("pieces_of_the_product")
def test_sigterm_stops_and_the_next_attempt_goes_on(place: Place, tmp_path: Path) -> None:
    context = place.context(weight_bytes=TRULY_LARGE)
    reached, released = threading.Event(), threading.Event()

    def watch(number: int, moment: Moment) -> None:
        if CHUNK_LINE[place.kind] in place.proxy.seen[number].line and moment is Moment.HALF:
            reached.set()
            released.wait(60)

    place.proxy.watch = watch
    process = start(place, context, tmp_path / "run")
    try:
        assert reached.wait(120)
        process.send_signal(signal.SIGTERM)
        released.set()
        output, _ = process.communicate(timeout=120)
    finally:
        released.set()
        process.kill()
        process.communicate()
    assert process.returncode == EXIT_CODES[FailureClass.PREEMPTED], output
    assert not is_complete(place.visible("v1"))
    place.proxy.watch = lambda _number, _moment: None
    brought(place, context)
    assert place.visible("v1") == published_files(context)
