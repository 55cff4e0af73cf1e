"""One file, whatever the source does and whenever the process is killed: the bytes are right, and durable ones are kept."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.fetch import transfer
from finetune_trainer.fetch.source import Digest, DigestKind, RemoteFile, SourceUnavailableError
from finetune_trainer.fetch.staging import FetchStaging
from finetune_trainer.fetch.transfer import TransferOptions, fetch_file, resume_point
from finetune_trainer.network.retry import RetryPolicy, TransientError

CONTENT = bytes(number * 7 % 251 for number in range(5000))


SYNC = 512


AT_ONCE = RetryPolicy(attempts=6, first_seconds=0.0, longest_seconds=0.0)


@pytest.fixture(autouse=True, scope="module")
def _small_reads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_READ_BYTES", 300)
        yield


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours handles it."""


class Scripted:
    """A source that ends each request as the script says."""

    def __init__(self, content: bytes, script: list[tuple[int, str]], chunk: int = 100) -> None:
        self.content, self.script, self.chunk = content, list(script), chunk
        self.offsets: list[int] = []

    def files(self) -> list[RemoteFile]:
        return []

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        self.offsets.append(offset)
        length, end = self.script.pop(0) if self.script else (len(self.content), "")
        stop = min(offset + length, len(self.content))
        for start in range(offset, stop, self.chunk):
            yield self.content[start : min(start + self.chunk, stop)]
        if end == "transient":
            raise TransientError("HTTP status 503")
        if end == "killed":
            raise Killed


def remote_file(content: bytes = CONTENT, version: str = "v1", *, digest: bool = False) -> RemoteFile:
    known = Digest(DigestKind.SHA256, hashlib.sha256(content).hexdigest()) if digest else None
    return RemoteFile("dir/file.bin", len(content), version, "dir/file.bin", known)


def taken(root: Path, source: Scripted, file: RemoteFile) -> bytes:
    staging = FetchStaging(root / "target")
    staging.open([file])
    fetched = fetch_file(source, file, staging, TransferOptions(AT_ONCE, threading.Event(), lambda _: None, SYNC))
    content = (staging.files / file.path).read_bytes()
    assert fetched.sha256 == hashlib.sha256(content).hexdigest()
    return content


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["", "transient", "killed"])), max_size=5),
    st.integers(1, 1500),
    st.booleans(),
)
def test_any_failures_in_any_order_give_the_same_bytes(script, chunk, digest):
    source, file = Scripted(CONTENT, script, chunk), remote_file(digest=digest)
    with TemporaryDirectory() as directory:
        while True:
            before = len(source.offsets)
            try:
                assert taken(Path(directory), source, file) == CONTENT
                break
            except Killed:
                assert len(source.offsets) > before
        source.offsets.clear()
        assert taken(Path(directory), source, file) == CONTENT
        assert source.offsets == []


def test_a_killed_transfer_resumes_after_the_durable_bytes(tmp_path):
    source = Scripted(CONTENT, [(3000, "killed")])
    with pytest.raises(Killed):
        taken(tmp_path, source, remote_file())
    assert taken(tmp_path, source, remote_file()) == CONTENT
    assert source.offsets == [0, 3000 // SYNC * SYNC]


def test_within_an_attempt_not_a_byte_is_read_twice(tmp_path):
    source = Scripted(CONTENT, [(1234, "transient"), (2000, "")])
    assert taken(tmp_path, source, remote_file()) == CONTENT
    assert source.offsets == [0, 1234, 3234]


def test_the_beginning_of_another_version_is_not_resumed(tmp_path):
    with pytest.raises(Killed):
        taken(tmp_path, Scripted(CONTENT, [(3000, "killed")]), remote_file())
    changed = CONTENT[::-1]
    source = Scripted(changed, [])
    assert taken(tmp_path, source, remote_file(changed, "v2")) == changed
    assert source.offsets == [0]


def test_a_source_that_sends_more_than_it_listed_is_given_up(tmp_path):
    file = remote_file(CONTENT[:-1])
    with pytest.raises(SourceUnavailableError, match="more than the listed 4999 bytes"):
        taken(tmp_path, Scripted(CONTENT, []), file)


def test_an_empty_file_needs_no_request(tmp_path):
    source = Scripted(b"", [])
    assert taken(tmp_path, source, remote_file(b"")) == b""
    assert source.offsets == []


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_only_what_was_synced_counts(length, sync_bytes):
    point = resume_point(length, sync_bytes)
    assert point % sync_bytes == 0
    assert 0 <= point <= length
    assert length - point <= sync_bytes
