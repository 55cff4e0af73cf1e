"""Reads `s3://` sources with boto3: one object, or all objects below a prefix, each in the listed version."""

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
"""Bytes per request. Object stores are fast only with several requests in flight."""
RANGES_AT_ONCE = 4
"""Number of requests in flight for one file. With eight files at once, their answers take half a gibibyte of memory."""


class BucketPrefix:
    """One object, or the objects below a prefix."""

    def __init__(self, store: Any, place: BucketPath, field: str, refused: type[TrainerError], *, signed: bool) -> None:
        """store: boto3's client. field: the manifest's field that names the source. refused: error to raise if the source does
        not exist or access is denied. signed: whether there are credentials.
        """
        self._store, self._place, self._refused, self._signed = store, place, refused, signed
        self._shown = f"{field}: s3://{place.bucket}/{place.prefix}"

    def files(self) -> list[RemoteFile]:
        """Return the object that the place names, or else all objects below that prefix. Raises TransientError, TrainerError."""
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
            message = f"{self._shown}: there is no such object and nothing below it"
            raise self._refused(message, "correct the bucket or the prefix")
        return files

    def _single(self) -> RemoteFile | None:
        key = self._place.prefix
        if not key:
            return None
        try:
            answer = self._store.head_object(Bucket=self._place.bucket, Key=key)
        except ClientError as error:
            if status_of(error) in DENIED | ABSENT:
                # Reading may be denied, or the name may be only a prefix. The listing that follows reports any error.
                return None
            raise
        return self._remote_file(key, answer["ContentLength"], answer.get("ETag"), key.rpartition("/")[2])

    def _remote_file(self, key: str, size: int, tag: str | None, path: str) -> RemoteFile:
        if not tag:
            raise SourceUnavailableError(
                f"{self._shown}: {key} has no ETag, so changes of it could not be noticed", "use another object store"
            )
        return RemoteFile(path=path, size=size, version=tag, address=key)

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes from `offset` on, requesting the next ranges ahead of time. Raises TransientError, TrainerError."""
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
            raise TransientError(f"the object store gives {answer['ContentLength']} bytes instead of {end - start}")
        content: bytes = answer["Body"].read()
        return content

    def _failure(self, error: Exception) -> Exception:
        """Return the error to raise in place of boto3's. Raises TransientError if trying again may help."""
        refused = refusal(error)
        detail = f" ({refused})"
        if refused.status in DENIED or refused.lacks_credentials:
            hint = "the keys of spec.fetch.s3SecretRef (on your own machine: those of your AWS tools) may not list and read it"
            if not self._signed:
                keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                hint = f"name a Secret with {keys} in spec.fetch.s3SecretRef (on your own machine: log in as for AWS tools)"
            return self._refused(f"{self._shown}: access is refused{detail}", hint)
        if refused.status in ABSENT:
            message = f"{self._shown}: there is no such bucket or object{detail}"
            return self._refused(message, "correct the bucket or the key")
        if refused.status == HTTPStatus.PRECONDITION_FAILED:
            message = f"{self._shown}: an object changed while it was copied"
            return SourceUnavailableError(message, "let nothing write below the prefix during a run")
        message = f"{self._shown}: the object store refuses the request{detail}"
        return SourceUnavailableError(message, "check s3Endpoint and s3Region of the profile's spec.fetch")
