"""Publishing to an object store in memory. A real store, faults and kills are in tests/integration and tests/kill."""

import threading
from pathlib import Path

import pytest
from botocore.awsrequest import AWSPreparedRequest

from finetune_job.api.base import BucketPath
from finetune_trainer.context import RunContext
from finetune_trainer.errors import DestinationRefusedError, DestinationUnavailableError
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.retry import RetryPolicy, StoppedError
from finetune_trainer.publish import s3
from finetune_trainer.publish.resumable import UploadJournal
from finetune_trainer.publish.s3 import BucketDestination, part_size
from finetune_trainer.publish.s3_client import Bucket
from finetune_trainer.release.checksums import read_release
from tests.support.finished_run import finished_run, published_files
from tests.support.memory_s3 import BUCKET, Answer, MemoryS3

MIB = 1 << 20
QUICK = RetryPolicy(attempts=2, first_seconds=0.01, longest_seconds=0.02)


@pytest.mark.parametrize(
    ("file", "part"),
    [
        (1, 16 * MIB),
        (160_000 * MIB, 16 * MIB),
        # One byte more than 10,000 parts of 16 MiB hold.
        (160_000 * MIB + 1, 16 * MIB + 1),
        (168_000_000_000, 16_800_000),
        (168_000_000_001, 16_800_001),
        (5_000_000_000_000, 500_000_000),
        (4_999_999_999_993, 500_000_000),
    ],
)
def test_a_part_is_as_small_as_ten_thousand_of_them_may_be(file, part):
    assert part_size(file, 16 * MIB) == part


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryS3:
    made = MemoryS3()
    monkeypatch.setattr(s3, "open_store", lambda *_, **_more: made.client())
    return made


def publish(context: RunContext, stop: threading.Event | None = None) -> str:
    place = BucketPath(bucket=BUCKET, prefix="tuned")
    journal = UploadJournal(context.workspace.publication)
    destination = BucketDestination(place, S3Service(None, "here"), None, journal, stop or threading.Event(), patience=QUICK)
    return destination.publish(read_release(context)).digest


def run(directory: Path, seed: str) -> RunContext:
    return finished_run(directory / seed, "s3://ours/tuned", seed=seed)


def visible(context: RunContext) -> dict[str, bytes]:
    return {f"tuned/{name}": content for name, content in published_files(context).items()}


@pytest.mark.parametrize("is_last", [False, True])
def test_two_publications_at_once_do_not_overwrite_each_other(store: MemoryS3, tmp_path: Path, is_last: bool) -> None:
    """Another publication comes and ends after the first has seen that the prefix is empty, before its first or last write."""
    slow, fast = run(tmp_path, "slow"), run(tmp_path, "fast")

    def interleave(request: AWSPreparedRequest) -> None:
        if request.method == "PUT" and (not is_last or request.url.endswith("SHA256SUMS")):
            store.before = lambda _: None
            # What the slow one has written so far is of the fast one's names, so that it would be refused.
            store.objects.clear()
            publish(fast)

    store.before = interleave
    with pytest.raises(DestinationRefusedError, match="holds another"):
        publish(slow)
    assert store.objects == visible(fast)


def test_after_a_lost_answer_our_own_object_is_recognised(store: MemoryS3, tmp_path: Path) -> None:
    context, lost = run(tmp_path, "first"), set()

    def lose(request: AWSPreparedRequest) -> Answer | None:
        if request.method == "PUT" and request.url not in lost:
            lost.add(request.url)
            store.before = lambda _: None
            store._answer(request)
            store.before = lose
            return 500, {}, b""
        return None

    store.before = lose
    publish(context)
    assert len(lost) == len(visible(context))
    assert store.objects == visible(context)


def test_a_store_without_conditional_writes_is_written_to_all_the_same(
    store: MemoryS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.before = lambda request: (501, {}, b"") if "If-None-Match" in request.headers else None
    context = run(tmp_path, "first")
    publish(context)
    assert store.objects == visible(context)
    assert caplog.text.count("cannot refuse to overwrite") == 1


def test_what_is_sent_is_what_was_proven(store: MemoryS3, tmp_path: Path) -> None:
    context = run(tmp_path, "first")
    publish(context)
    assert store.digests == {
        f"tuned/{file.name}": file.sha256 for file in [*read_release(context).files, read_release(context).manifest]
    }


def test_an_object_that_vanishes_is_no_release(store: MemoryS3, tmp_path: Path) -> None:
    def forget(request: AWSPreparedRequest) -> Answer | None:
        if request.method == "HEAD":
            store.objects.clear()
        return None

    store.before = forget
    with pytest.raises(DestinationUnavailableError, match="existed and is gone"):
        publish(run(tmp_path, "first"))
    assert store.objects == {}


def test_a_stop_ends_a_body_in_the_middle() -> None:
    store, stop = MemoryS3(), threading.Event()

    def half(request: AWSPreparedRequest) -> Answer:
        request.body.read(10)
        stop.set()
        return 200, {}, request.body.read(10)

    store.before = half
    with pytest.raises(StoppedError):
        Bucket(store.client(), BUCKET, stop, QUICK, signed=False).put("key", b"x" * 100, "0")
    assert store.objects == {}


def test_a_listing_that_does_not_advance_is_given_up(store: MemoryS3, tmp_path: Path) -> None:
    page = (
        b"<Page><IsTruncated>true</IsTruncated><NextContinuationToken>a</NextContinuationToken>"
        b"<NextPartNumberMarker>1</NextPartNumberMarker><NextKeyMarker>k</NextKeyMarker></Page>"
    )
    store.before = lambda _: (200, {}, page)
    with pytest.raises(DestinationUnavailableError):
        publish(run(tmp_path, "first"))
