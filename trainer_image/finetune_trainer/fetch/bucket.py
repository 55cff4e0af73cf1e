"""`s3://` sources, read with boto3: an object, or all objects below a prefix, each in the listed version."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from botocore.exceptions import ClientError

from finetune_job.api.base import BucketPath
from finetune_trainer.errors import TrainerError
from finetune_trainer.fetch.source import RemoteFile, SourceUnavailableError
from finetune_trainer.network.http_status import ABSENT, DENIED
from finetune_trainer.network.object_store import FAILURES, refusal, status_of
from finetune_trainer.network.retry import TransientError

RANGE_BYTES = 16 * 1024**2
"""Bytes of one request. An object store is fast with many requests at once."""
RANGES_AT_ONCE = 4
"""Requests in flight for one file; with eight files at a time they hold at most half a gibibyte."""


class BucketPrefix:
    """One object, or the objects below a prefix."""

    def __init__(self, store: Any, place: BucketPath, field: str, refused: type[TrainerError], *, signed: bool) -> None:
        """store: boto3's client. field: where the manifest names the source. refused: error to raise if the source does not exist
        or access is denied. signed: whether there are credentials.
        """
        self._store, self._place, self._refused, self._signed = store, place, refused, signed
        self._shown = f"{field}: s3://{place.bucket}/{place.prefix}"

    def files(self) -> list[RemoteFile]:
        """The object of that name, or else everything below it. Raises TransientError, TrainerError."""
        try:
            single = self._single()
            if single is not None:
                return [single]
            prefix = f"{self._place.prefix}/" if self._place.prefix else ""
            pages = self._store.get_paginator("list_objects_v2").paginate(Bucket=self._place.bucket, Prefix=prefix)
            files = [
                self._remote_file(entry["Key"], entry["Size"], entry.get("ETag"), entry["Key"].removeprefix(prefix))
                for page in pages
                for entry in page.get("Contents", ())
                if not entry["Key"].endswith("/")
            ]
        except FAILURES as error:
            raise self._failure(error) from None
        if not files:
            raise self._refused(
                f"{self._shown}: there is no such object and nothing below it", "correct the bucket or the prefix"
            )
        return files

    def _single(self) -> RemoteFile | None:
        key = self._place.prefix
        if not key:
            return None
        try:
            answer = self._store.head_object(Bucket=self._place.bucket, Key=key)
        except ClientError as error:
            if status_of(error) in DENIED | ABSENT:
                # The listing reports both errors: a denied read, and a name that is only a prefix.
                return None
            raise
        return self._remote_file(key, answer["ContentLength"], answer.get("ETag"), key.rpartition("/")[2])

    def _remote_file(self, key: str, size: int, tag: str | None, path: str) -> RemoteFile:
        if not tag:
            raise SourceUnavailableError(
                f"{self._shown}: {key} has no ETag, so that a change of it could not be seen", "use another object store"
            )
        return RemoteFile(path=path, size=size, version=tag, address=key)

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes | memoryview]:
        """The bytes from `offset` on, some ranges ahead. Raises TransientError, TrainerError."""
        ahead: deque[Future[bytes]] = deque()
        executor = ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="range")
        try:
            for start in range(offset, file.size, RANGE_BYTES):
                ahead.append(executor.submit(self._range, file, start, min(start + RANGE_BYTES, file.size)))
                if len(ahead) == RANGES_AT_ONCE:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except FAILURES as error:
            raise self._failure(error) from None
        finally:
            executor.shutdown(cancel_futures=True)

    def _range(self, file: RemoteFile, start: int, end: int) -> bytes:
        answer = self._store.get_object(
            Bucket=self._place.bucket, Key=file.address, Range=f"bytes={start}-{end - 1}", IfMatch=file.version
        )
        if answer["ContentLength"] != end - start:
            raise TransientError(f"the object store gives {answer['ContentLength']} bytes where {end - start} were asked for")
        content: bytes = answer["Body"].read()
        return content

    def _failure(self, error: Exception) -> Exception:
        """Return the error to raise instead. Raises TransientError if trying again may help."""
        refused = refusal(error)
        said = f" ({refused})"
        if refused.status in DENIED or refused.lacks_credentials:
            return self._denied(said)
        if refused.status in ABSENT:
            return self._not_found(said)
        if refused.status == HTTPStatus.PRECONDITION_FAILED:
            return SourceUnavailableError(
                f"{self._shown}: an object changed while it was copied", "let nothing write below the prefix during a run"
            )
        return SourceUnavailableError(
            f"{self._shown}: the object store refuses the request{said}",
            "check s3Endpoint and s3Region of the profile's spec.fetch",
        )

    def _not_found(self, said: str) -> Exception:
        return self._refused(f"{self._shown}: there is no such bucket or object{said}", "correct the bucket or the key")

    def _denied(self, said: str) -> Exception:
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        if self._signed:
            hint = "the keys of spec.fetch.s3SecretRef (on your own machine: those of your tools of AWS) may not list and read it"
        else:
            hint = f"name a Secret with {keys} in spec.fetch.s3SecretRef (on your own machine: log in as for the tools of AWS)"
        return self._refused(f"{self._shown}: access is refused{said}", hint)
