"""Object stores: what lies below a prefix, reading in ranges, and what an answer means. The real server is in
tests/integration."""

from __future__ import annotations

import obstore
import pytest
from obstore.store import MemoryStore

from finetune_job.api.base import BucketPath
from finetune_job.failures import FailureClass
from finetune_trainer.credentials import S3Keys
from finetune_trainer.errors import DataError, TrainerError
from finetune_trainer.fetch import bucket as bucket_module
from finetune_trainer.fetch.bucket import BucketPrefix, open_bucket
from finetune_trainer.fetch.source import SourceUnavailableError
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.retry import TransientError
from finetune_trainer.roles import fetch as run_module
from finetune_trainer.roles.fetch import fetch
from tests.support.hub import Fault
from tests.unit.finetune_trainer.fetch.conftest import LOCAL, QUICK
from tests.unit.finetune_trainer.fetch.test_hub import content

CONTENT = bytes(number % 251 for number in range(10_000))


def store_of(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, value in objects.items():
        obstore.put(store, key, value)
    return store


def prefix_of(store, prefix: str, *, signed: bool = True) -> BucketPrefix:
    return BucketPrefix(store, BucketPath(bucket="data", prefix=prefix), "spec.data.source", DataError, signed=signed)


def test_a_prefix_is_whole_segments():
    store = store_of({"models/llama/a.json": b"a", "models/llama/sub/b.json": b"b", "models/llama-evil/c.json": b"c"})
    assert {file.path for file in prefix_of(store, "models/llama").files()} == {"a.json", "sub/b.json"}
    assert {file.path for file in prefix_of(store, "").files()} == {
        "models/llama/a.json",
        "models/llama/sub/b.json",
        "models/llama-evil/c.json",
    }


def test_an_object_of_that_name_is_one_file():
    [file] = prefix_of(store_of({"sets/a.jsonl": CONTENT, "sets/b.jsonl": b"b"}), "sets/a.jsonl").files()
    assert (file.path, file.size, file.address) == ("a.jsonl", len(CONTENT), "sets/a.jsonl")


def test_nothing_below_a_prefix_is_said():
    with pytest.raises(DataError, match="s3://data/sets: there is no such object and nothing below it"):
        prefix_of(store_of({"other": b"x"}), "sets").files()


@pytest.mark.parametrize("offset", [0, 1, 999, 1000, 1001, 9_999])
def test_ranges_come_in_order(monkeypatch, offset):
    monkeypatch.setattr(bucket_module, "RANGE_BYTES", 1000)
    remote = prefix_of(store_of({"a": CONTENT}), "a")
    [file] = remote.files()
    assert b"".join(remote.read(file, offset)) == CONTENT[offset:]


def test_an_object_that_changed_since_the_listing_is_not_mixed():
    store = store_of({"a": CONTENT})
    remote = prefix_of(store, "a")
    [file] = remote.files()
    obstore.put(store, "a", CONTENT[::-1])
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
    keys = S3Keys("key-id", "the-secret-key")
    with pytest.raises(kind, match=words) as caught:
        prefix_of(open_bucket("data", S3Service(hub.address, "us-east-1"), keys), prefix).files()
    if status == 403:
        assert "spec.fetch.s3SecretRef" in caught.value.hint
    assert all("Authorization" in request.headers for request in hub.requests)
    assert "the-secret-key" not in f"{caught.value!r} {caught.value.__cause__!r}"
    assert caught.value.__suppress_context__


def test_nobody_there_may_pass():
    with pytest.raises(TransientError, match="did not answer"):
        prefix_of(open_bucket("data", S3Service("http://127.0.0.1:1", "us-east-1"), None), "").files()


def test_without_keys_nothing_is_signed(hub):
    hub.fail("/data", Fault(9, status=403))
    with pytest.raises(DataError) as caught:
        prefix_of(open_bucket("data", S3Service(hub.address, "us-east-1"), None), "", signed=False).files()
    assert "name a Secret" in caught.value.hint
    assert all("Authorization" not in request.headers for request in hub.requests)


def test_the_role_copies_from_a_bucket_and_fails_when_it_changes(context_of, monkeypatch):
    objects = {"base/config.json": b"{}", "base/model.safetensors": CONTENT, "base/model.bin": b"p", "sets/train.jsonl": b"{}\n"}
    store = store_of(objects)
    monkeypatch.setattr(run_module, "open_bucket", lambda *_: store)
    context = context_of({"model.source": "s3://models/base", "data.source": "s3://models/sets/train.jsonl"})
    report = fetch(context, LOCAL, QUICK)
    assert content(context.base_model) == {"config.json": b"{}", "model.safetensors": CONTENT}
    assert content(context.path(context.plan.data.train[0].location)) == {"train.jsonl": b"{}\n"}
    assert report.facts["files"] == "3"

    class Changing(BucketPrefix):
        def read(self, file, offset):
            obstore.put(store, file.address, b"other")
            return super().read(file, offset)

    monkeypatch.setattr(run_module, "BucketPrefix", Changing)
    (context.base_model / "config.json").write_bytes(b"[]")
    with pytest.raises(TrainerError) as caught:
        fetch(context, LOCAL, QUICK)
    assert caught.value.failure is FailureClass.SOURCE_UNAVAILABLE
