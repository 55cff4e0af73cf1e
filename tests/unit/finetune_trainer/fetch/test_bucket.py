"""Object stores: what lies below a prefix, reading in ranges, and what an answer means. The real server is in
tests/integration."""

import pytest
from boto3.session import Session

from finetune_job.api.base import BucketPath
from finetune_job.failures import FailureClass
from finetune_trainer.errors import DataError, TrainerError
from finetune_trainer.fetch import bucket as bucket_module
from finetune_trainer.fetch.bucket import BucketPrefix
from finetune_trainer.fetch.source import SourceUnavailableError
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.object_store import open_store
from finetune_trainer.network.retry import TransientError
from finetune_trainer.roles import fetch as run_module
from finetune_trainer.roles.fetch import fetch
from tests.support.hub import Fault
from tests.support.memory_s3 import BUCKET, MemoryS3
from tests.unit.finetune_trainer.fetch.conftest import LOCAL, QUICK
from tests.unit.finetune_trainer.fetch.test_hub import content

CONTENT = bytes(number % 251 for number in range(10_000))


def prefix_of(store: MemoryS3, prefix: str) -> BucketPrefix:
    return BucketPrefix(store.client(), BucketPath(bucket=BUCKET, prefix=prefix), "spec.data.source", DataError, signed=True)


def at(address: str, session: Session | None = None, prefix: str = "") -> BucketPrefix:
    """A bucket of a server."""
    client = open_store(S3Service(address, "us-east-1"), session, connections=1)
    return BucketPrefix(
        client, BucketPath(bucket="data", prefix=prefix), "spec.data.source", DataError, signed=session is not None
    )


def test_a_prefix_is_whole_segments():
    store = MemoryS3({"models/llama/a.json": b"a", "models/llama/sub/b.json": b"b", "models/llama-evil/c.json": b"c"})
    assert {file.path for file in prefix_of(store, "models/llama").files()} == {"a.json", "sub/b.json"}
    assert {file.path for file in prefix_of(store, "").files()} == {
        "models/llama/a.json",
        "models/llama/sub/b.json",
        "models/llama-evil/c.json",
    }


def test_an_object_of_that_name_is_one_file():
    [file] = prefix_of(MemoryS3({"sets/a.jsonl": CONTENT, "sets/b.jsonl": b"b"}), "sets/a.jsonl").files()
    assert (file.path, file.size, file.address) == ("a.jsonl", len(CONTENT), "sets/a.jsonl")


def test_an_empty_prefix_is_refused():
    with pytest.raises(DataError, match="s3://ours/sets: there is no such object and nothing below it"):
        prefix_of(MemoryS3({"other": b"x"}), "sets").files()


@pytest.mark.parametrize("offset", [0, 1, 999, 1000, 1001, 9_999])
def test_ranges_come_in_order(monkeypatch, offset):
    monkeypatch.setattr(bucket_module, "RANGE_BYTES", 1000)
    remote = prefix_of(MemoryS3({"a": CONTENT}), "a")
    [file] = remote.files()
    assert b"".join(remote.read(file, offset)) == CONTENT[offset:]


def test_an_object_that_changed_since_the_listing_is_not_mixed():
    store = MemoryS3({"a": CONTENT})
    remote = prefix_of(store, "a")
    [file] = remote.files()
    store.objects["a"] = CONTENT[::-1]
    with pytest.raises(SourceUnavailableError, match="changed while it was copied"):
        list(remote.read(file, 0))


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (503, TransientError, "HTTP status 503"),
        (429, TransientError, "HTTP status 429"),
        (403, DataError, "access is refused"),
        (404, DataError, "no such bucket"),
        (400, SourceUnavailableError, "HTTP status 400"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "sets/a.jsonl"])
def test_what_an_answer_means(hub, status, kind, words, prefix):
    hub.fail("/data", Fault(9, status=status))
    session = Session(aws_access_key_id="key-id", aws_secret_access_key="the-secret-key")
    with pytest.raises(kind, match=words) as caught:
        at(hub.address, session, prefix).files()
    if status == 403:
        assert "spec.fetch.s3SecretRef" in caught.value.hint
    assert all("Authorization" in request.headers for request in hub.requests)
    assert "the-secret-key" not in f"{caught.value!r} {caught.value.__cause__!r}"
    assert caught.value.__suppress_context__


def test_a_store_that_knows_no_ranges_fills_no_memory(monkeypatch):
    monkeypatch.setattr(bucket_module, "RANGE_BYTES", 1000)
    store = MemoryS3({"a": CONTENT})
    remote = prefix_of(store, "a")
    [file] = remote.files()
    store.before = lambda _: (200, {}, CONTENT)
    with pytest.raises(TransientError, match="gives 10000 bytes instead of 1000"):
        list(remote.read(file, 0))


def test_a_server_that_does_not_answer_is_a_transient_error():
    with pytest.raises(TransientError, match="did not answer"):
        at("http://127.0.0.1:1").files()


def test_without_keys_nothing_is_signed(hub):
    hub.fail("/data", Fault(9, status=403))
    with pytest.raises(DataError) as caught:
        at(hub.address).files()
    assert "name a Secret" in caught.value.hint
    assert all("Authorization" not in request.headers for request in hub.requests)


def test_the_role_copies_from_a_bucket_and_fails_when_it_changes(context_of, monkeypatch):
    objects = {"base/config.json": b"{}", "base/model.safetensors": CONTENT, "base/model.bin": b"p", "sets/train.jsonl": b"{}\n"}
    store = MemoryS3(objects)
    monkeypatch.setattr(run_module, "open_store", lambda *_, **_more: store.client())
    context = context_of({"model.source": "s3://ours/base", "data.source": "s3://ours/sets/train.jsonl"})
    report = fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == {"config.json": b"{}", "model.safetensors": CONTENT}
    assert content(context.path(context.plan.data.train[0].location)) == {"train.jsonl": b"{}\n"}
    assert report.facts["files"] == "3"

    class Changing(BucketPrefix):
        def read(self, file, offset):
            store.objects[file.address] = b"other"
            return super().read(file, offset)

    monkeypatch.setattr(run_module, "BucketPrefix", Changing)
    (context.base_model / "config.json").write_bytes(b"[]")
    with pytest.raises(TrainerError) as caught:
        fetch(context, LOCAL, QUICK)
    assert caught.value.failure is FailureClass.SOURCE_UNAVAILABLE
