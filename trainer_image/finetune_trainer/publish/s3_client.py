"""Sends a publication's requests to an S3-compatible object store, with one method per kind, and retries transient failures."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.network.http_status import DENIED, NOT_FOUND
from finetune_trainer.network.object_store import FAILURES, StoreRefusal, refusal, status_of
from finetune_trainer.network.retry import RetryPolicy, StoppedError, with_retries
from finetune_trainer.publish.destination import (
    DESTINATION_FIELD,
    access_denied,
    destination_unavailable,
    out_of_space,
    target_not_found,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
SHA256 = "sha256"
"""Metadata key for an object's digest, which can be trusted: the store compared each request's body with its signed digest.
"""


class NoSuchUploadError(Exception):
    """The store does not know the multipart upload: it was completed or aborted, or has expired."""


class ExistsError(Exception):
    """An object with this key already exists; it was not overwritten."""


@dataclass(frozen=True)
class StoredObject:
    """An object as the store describes it."""

    size: int
    sha256: str | None
    """Digest that the object's writer recorded, or None."""


class _Body(io.BytesIO):
    """The body of a request. It ends the request when the publication is stopped."""

    def __init__(self, content: bytes, stop: threading.Event) -> None:
        super().__init__(content)
        self._stop = stop

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stop.is_set():
            raise StoppedError
        return super().read(size)


class Bucket:
    """One bucket, used from several threads.

    Every method may raise StoppedError, DestinationUnavailableError (after too many failures in a row), DestinationRefusedError.
    """

    def __init__(self, client: Any, bucket: str, stop: threading.Event, patience: RetryPolicy, *, signed: bool) -> None:
        """client: boto3's client. signed: whether it has credentials."""
        self._client, self._bucket, self._stop, self._patience, self._signed = client, bucket, stop, patience, signed
        self._lock, self.bytes_sent = threading.Lock(), 0
        self._creates_only = True
        self.shown = f"{DESTINATION_FIELD}: bucket {bucket}"

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def list_objects(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the objects whose keys have this prefix, by key."""
        return dict(self._listed("listing it", "list_objects_v2", "Contents", ("Key", "Size"), Prefix=prefix))

    def head(self, key: str) -> StoredObject | None:
        """Return the store's description of an object, or None if the object does not exist."""

        def look() -> StoredObject | None:
            try:
                answer = self._client.head_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if status_of(error) == NOT_FOUND:
                    return None
                raise
            return StoredObject(answer["ContentLength"], answer["Metadata"].get(SHA256))

        return self._request(f"looking at {key}", look)

    def get(self, key: str, size: int) -> bytes:
        """Return the first `size` bytes of an object."""

        def read() -> bytes:
            content: bytes = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read(size)
            return content

        return self._request(f"reading {key}", read)

    def put(self, key: str, content: bytes, sha256: str) -> None:
        """Write an object in one step. Raises ExistsError."""
        self._create(f"writing {key}", self._client.put_object, content, Key=key, Metadata={SHA256: sha256})

    def create_upload(self, key: str, sha256: str) -> str:
        """Begin a multipart upload of an object with this digest, and return the upload's id."""
        start, metadata = self._client.create_multipart_upload, {SHA256: sha256}
        return self._request(f"writing {key}", lambda: str(start(Bucket=self._bucket, Key=key, Metadata=metadata)["UploadId"]))

    def upload_part(self, key: str, upload: str, number: int, content: bytes) -> str:
        """Send a part and return its ETag. Raises NoSuchUploadError."""

        def send() -> str:
            body = _Body(content, self._stop)
            answer = self._client.upload_part(Bucket=self._bucket, Key=key, UploadId=upload, PartNumber=number, Body=body)
            return str(answer["ETag"])

        tag = self._request(f"writing part {number} of {key}", send)
        self._sent(content)
        return tag

    def parts(self, key: str, upload: str) -> dict[int, str]:
        """Return the ETags of the parts that the store has, by part number. Raises NoSuchUploadError."""
        what, names = f"listing the parts of {key}", ("PartNumber", "ETag")
        return dict(self._listed(what, "list_parts", "Parts", names, Key=key, UploadId=upload))

    def complete_upload(self, key: str, upload: str, tags: Mapping[int, str]) -> None:
        """Assemble the object from its parts. Raises NoSuchUploadError, ExistsError."""
        parts = {"Parts": [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]}
        complete = self._client.complete_multipart_upload
        self._create(f"completing {key}", complete, None, Key=key, UploadId=upload, MultipartUpload=parts)

    def abort_upload(self, key: str, upload: str) -> None:
        """Abort an upload, so that the store drops its parts; does nothing if the store does not know the upload."""
        try:
            self._request(
                f"aborting an upload of {key}",
                lambda: self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload),
            )
        except NoSuchUploadError:
            log.debug("%s: the upload was already completed or aborted", key)

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return the key and the id of each unfinished multipart upload whose key has this prefix."""
        return self._listed("listing its uploads", "list_multipart_uploads", "Uploads", ("Key", "UploadId"), Prefix=prefix)

    def _listed(self, what: str, operation: str, entries: str, names: tuple[str, str], **arguments: str) -> list[tuple[Any, Any]]:
        """Return the values under these two names in each entry, from all pages of a list."""
        first, second = names

        def read() -> list[tuple[Any, Any]]:
            listed = []
            for page in self._client.get_paginator(operation).paginate(Bucket=self._bucket, **arguments):
                if self._stop.is_set():
                    raise StoppedError
                listed += [(entry[first], entry[second]) for entry in page.get(entries, ())]
            return listed

        return self._request(what, read)

    def _create(self, what: str, operation: Callable[..., Any], content: bytes | None, **arguments: Any) -> None:
        """Create an object only if its key is free, so nothing is overwritten, and one of two simultaneous publications fails."""

        def create() -> None:
            is_conditional = self._creates_only
            condition = {"IfNoneMatch": "*"} if is_conditional else {}
            body = {} if content is None else {"Body": _Body(content, self._stop)}
            try:
                operation(Bucket=self._bucket, **arguments, **body, **condition)
            except ClientError as error:
                if status_of(error) == HTTPStatus.PRECONDITION_FAILED:
                    raise ExistsError from None
                if status_of(error) != HTTPStatus.NOT_IMPLEMENTED or not is_conditional:
                    raise
                log.warning("%s: the object store cannot refuse to overwrite; let nothing else write there", self.shown)
                self._creates_only = False
                create()

        self._request(what, create)
        self._sent(content or b"")

    def _sent(self, content: bytes) -> None:
        with self._lock:
            self.bytes_sent += len(content)

    def _request(self, what: str, operation: Callable[[], T]) -> T:
        """Return the result of a request. Failures that remain after retries become errors of the destination."""

        def once() -> T:
            if self._stop.is_set():
                raise StoppedError
            try:
                return operation()
            except FAILURES as error:
                if self._stop.is_set():  # boto3 wraps errors of a body
                    raise StoppedError from None
                refused = refusal(error)
                if refused.code == "NoSuchUpload":
                    raise NoSuchUploadError from None
                raise self._failure(refused, what) from None

        return with_retries(f"{self.shown}: {what}", self._patience, self._stop, destination_unavailable, once)

    def _failure(self, refused: StoreRefusal, what: str) -> DestinationRefusedError:
        detail = f" ({refused}, {what})"
        if refused.is_full:
            return out_of_space(self.shown, detail)
        if refused.code == "RequestTimeTooSkewed":
            return DestinationRefusedError(f"{self.shown} says that this node's clock is wrong{detail}", "set the node's clock")
        if refused.status in DENIED or refused.lacks_credentials:
            holds = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, on your own machine whatever the tools of AWS use"
            return access_denied(self.shown, detail, signed=self._signed, secret_holds=holds)
        if refused.status == NOT_FOUND:
            return target_not_found(self.shown, detail, "bucket")
        return DestinationRefusedError(
            f"{self.shown}: the object store refuses the request{detail}",
            "check s3Endpoint and s3Region of the profile's spec.publish",
        )
