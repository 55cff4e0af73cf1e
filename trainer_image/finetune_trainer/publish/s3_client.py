"""The requests to an S3-compatible object store that a publication needs, one method each; the caller retries transient
failures.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from botocore.exceptions import ClientError

from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.network.http_status import DENIED, NOT_FOUND
from finetune_trainer.network.object_store import FAILURES, StoreRefusal, refusal, status_of
from finetune_trainer.network.retry import StoppedError
from finetune_trainer.publish.destination import DESTINATION_FIELD, access_denied, out_of_space, target_not_found

log = logging.getLogger(__name__)
SHA256 = "sha256"
"""Metadata of an object with its digest, written with the object: the store compared the body of every request with its signed
digest.
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
    """Digest that its writer recorded; None without one."""


class _Body(io.BytesIO):
    """The body of a request, which ends the request when the publication is stopped."""

    def __init__(self, content: bytes, stop: threading.Event) -> None:
        super().__init__(content)
        self._stop = stop

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stop.is_set():
            raise StoppedError
        return super().read(size)


class Bucket:
    """One bucket, used from several threads.

    Every method raises TransientError if trying again may help, StoppedError, else DestinationRefusedError.
    """

    def __init__(self, client: Any, bucket: str, stop: threading.Event, *, signed: bool) -> None:
        """client: of boto3. signed: whether it has credentials."""
        self._client, self._bucket, self._stop, self._signed = client, bucket, stop, signed
        self._lock, self.bytes_sent = threading.Lock(), 0
        self._creates_only = True
        self.shown = f"{DESTINATION_FIELD}: bucket {bucket}"

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def list_objects(self, prefix: str) -> dict[str, int]:
        """Return the keys with this prefix, and the sizes of their objects."""
        with self._request("listing it"):
            pages = self._pages("list_objects_v2", Prefix=prefix)
            return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}

    def head(self, key: str) -> StoredObject | None:
        """Return the store's description of an object, or None if there is none."""
        with self._request(f"looking at {key}"):
            try:
                answer = self._client.head_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if status_of(error) == NOT_FOUND:
                    return None
                raise
        return StoredObject(answer["ContentLength"], answer["Metadata"].get(SHA256))

    def get(self, key: str, size: int) -> bytes:
        """Return the first `size` bytes of an object."""
        with self._request(f"reading {key}"):
            content: bytes = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read(size)
        return content

    def put(self, key: str, content: bytes, sha256: str) -> None:
        """Write an object in one step. Raises ExistsError."""
        with self._request(f"writing {key}"):
            self._create(self._client.put_object, content, Key=key, Metadata={SHA256: sha256})
        self._sent(content)

    def create_upload(self, key: str, sha256: str) -> str:
        """Return the id of a new multipart upload of an object with this digest."""
        with self._request(f"writing {key}"):
            answer = self._client.create_multipart_upload(Bucket=self._bucket, Key=key, Metadata={SHA256: sha256})
            return str(answer["UploadId"])

    def upload_part(self, key: str, upload: str, number: int, content: bytes) -> str:
        """Return the part's ETag. Raises NoSuchUploadError."""
        with self._request(f"writing part {number} of {key}"):
            body = _Body(content, self._stop)
            answer = self._client.upload_part(Bucket=self._bucket, Key=key, UploadId=upload, PartNumber=number, Body=body)
            tag = str(answer["ETag"])
        self._sent(content)
        return tag

    def parts(self, key: str, upload: str) -> dict[int, str]:
        """Return the ETags, by number, of the parts that the store has. Raises NoSuchUploadError."""
        with self._request(f"listing the parts of {key}"):
            pages = self._pages("list_parts", Key=key, UploadId=upload)
            return {part["PartNumber"]: part["ETag"] for page in pages for part in page.get("Parts", ())}

    def complete_upload(self, key: str, upload: str, tags: Mapping[int, str]) -> None:
        """Assemble the object from its parts. Raises NoSuchUploadError, ExistsError."""
        parts = [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]
        with self._request(f"completing {key}"):
            self._create(self._client.complete_multipart_upload, None, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})

    def abort_upload(self, key: str, upload: str) -> None:
        """Have the store drop the parts. Raises NoSuchUploadError."""
        with self._request(f"ending an upload of {key}"):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return key and id of unfinished multipart uploads whose keys have this prefix."""
        with self._request("listing its uploads"):
            pages = self._pages("list_multipart_uploads", Prefix=prefix)
            return [(upload["Key"], upload["UploadId"]) for page in pages for upload in page.get("Uploads", ())]

    def _pages(self, operation: str, **arguments: str) -> Iterator[dict[str, Any]]:
        for page in self._client.get_paginator(operation).paginate(Bucket=self._bucket, **arguments):
            if self._stop.is_set():
                raise StoppedError
            yield page

    def _create(self, operation: Callable[..., Any], content: bytes | None, **arguments: Any) -> None:
        """Create an object only if none has its key, so that nothing is overwritten, and one of two publications is refused."""
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
            self._create(operation, content, **arguments)

    def _sent(self, content: bytes) -> None:
        with self._lock:
            self.bytes_sent += len(content)

    @contextmanager
    def _request(self, what: str) -> Iterator[None]:
        """Turn failures of the requests in the body into those of a destination."""
        if self._stop.is_set():
            raise StoppedError
        try:
            yield
        except FAILURES as error:
            if self._stop.is_set():  # boto3 wraps errors of a body
                raise StoppedError from None
            refused = refusal(error)
            if refused.code == "NoSuchUpload":
                raise NoSuchUploadError from None
            raise self._failure(refused, what) from None

    def _failure(self, refused: StoreRefusal, what: str) -> DestinationRefusedError:
        said = f" ({refused}, {what})"
        if refused.is_full:
            return out_of_space(self.shown, said)
        if refused.code == "RequestTimeTooSkewed":
            return DestinationRefusedError(f"{self.shown}: says that this machine's clock is wrong{said}", "set the node's clock")
        if refused.status in DENIED or refused.lacks_credentials:
            holds = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, on your own machine whatever the tools of AWS use"
            return access_denied(self.shown, said, signed=self._signed, secret_holds=holds)
        if refused.status == NOT_FOUND:
            return target_not_found(self.shown, said, "bucket")
        return DestinationRefusedError(
            f"{self.shown}: the object store refuses the request{said}",
            "check s3Endpoint and s3Region of the profile's spec.publish",
        )
