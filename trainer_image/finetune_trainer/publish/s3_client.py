"""The requests to an S3-compatible object store that a publication needs, one method each; the caller repeats those that may
pass.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/. Buckets are named in the path, which every compatible server
understands.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from finetune_trainer.credentials import S3Keys
from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.http_status import DENIED, FULL, NOT_FOUND
from finetune_trainer.network.retry import TransientError
from finetune_trainer.publish.destination import DESTINATION_FIELD, access_denied, out_of_space, target_not_found
from finetune_trainer.publish.http import HttpClient, HttpResponse
from finetune_trainer.publish.s3_signature import EMPTY_SHA256, encoded_path, encoded_query, signed_headers

SHA256_HEADER = "x-amz-meta-sha256"
"""What proves an object, written with it: the store compared the body of every request with its signed digest."""
_CODE = re.compile(rb"<Code>(\w{1,64})</Code>")
_FULL_CODES = frozenset({"EntityTooLarge", "QuotaExceeded", "XAmzQuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
_PASSING_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "InternalError", "OperationAborted", "BadDigest", "XAmzContentSHA256Mismatch"}
)


class NoSuchUploadError(Exception):
    """The store does not know the multipart upload: it was completed, aborted, or ran out."""


@dataclass(frozen=True)
class StoredObject:
    """An object as the store describes it."""

    size: int
    sha256: str | None
    """As its writer announced it; None where it announced nothing."""


class Bucket:
    """One bucket. Every method raises TransientError where trying again may help, else DestinationRefusedError."""

    def __init__(self, wire: HttpClient, service: S3Service, bucket: str, keys: S3Keys | None) -> None:
        """`keys`: None leaves requests unsigned."""
        address = service.address or f"https://s3.{service.region}.amazonaws.com"
        self._wire, self._keys, self._region = wire, keys, service.region
        self._url = f"{address.rstrip('/')}/{encoded_path(bucket)}"
        self.shown = f"{DESTINATION_FIELD}: bucket {bucket}"

    def list_objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys that begin so, with the sizes of the objects."""
        query = {"list-type": "2", "prefix": prefix}
        for page in self._pages("", query, {"NextContinuationToken": "continuation-token"}, what="listing it"):
            for entry in page.iter("Contents"):
                yield entry.findtext("Key", ""), _number(entry, "Size")

    def head(self, key: str) -> StoredObject | None:
        """None: there is no such object."""
        answer = self._send("HEAD", key, {})
        if answer.status == NOT_FOUND:
            return None
        self._check(answer, f"looking at {key}")
        length = answer.headers.get("Content-Length", "")
        if not length.isdigit():
            raise TransientError(f"the object store does not say how long {key} is")
        return StoredObject(int(length), answer.headers.get(SHA256_HEADER))

    def get(self, key: str) -> bytes:
        """All bytes of a small object."""
        return self._request("GET", key, {}, what=f"reading {key}").content

    def put(self, key: str, content: bytes, sha256: str) -> None:
        """Write an object in one step."""
        self._request("PUT", key, {}, what=f"writing {key}", headers={SHA256_HEADER: sha256}, body=content)

    def create_upload(self, key: str, sha256: str) -> str:
        """Id of a new multipart upload of an object with this digest."""
        answer = self._request("POST", key, {"uploads": ""}, what=f"writing {key}", headers={SHA256_HEADER: sha256})
        found = self._document(answer).findtext("UploadId")
        if not found:
            raise DestinationRefusedError(f"{self.shown}: gives no id for the upload of {key}", "use another object store")
        return found

    def upload_part(self, key: str, upload: str, number: int, content: bytes) -> str:
        """The part's ETag. Raises NoSuchUploadError."""
        query = {"partNumber": str(number), "uploadId": upload}
        tag = self._request("PUT", key, query, what=f"writing part {number} of {key}", body=content).headers.get("ETag")
        if not tag:
            raise DestinationRefusedError(f"{self.shown}: gives no ETag for a part of {key}", "use another object store")
        return str(tag)

    def parts(self, key: str, upload: str) -> dict[int, str]:
        """ETags by number of the parts that the store has. Raises NoSuchUploadError."""
        markers = {"NextPartNumberMarker": "part-number-marker"}
        pages = self._pages(key, {"uploadId": upload}, markers, what=f"listing the parts of {key}")
        return {_number(part, "PartNumber"): part.findtext("ETag", "") for page in pages for part in page.iter("Part")}

    def complete_upload(self, key: str, upload: str, tags: Mapping[int, str]) -> None:
        """Make the object of the parts. Raises NoSuchUploadError."""
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tags[number])}</ETag></Part>" for number in sorted(tags)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        answer = self._request("POST", key, {"uploadId": upload}, what=f"completing {key}", body=body)
        # The status goes out before the store is done, so a failure may follow in the body.
        code = _code(answer)
        if code is not None:
            raise TransientError(f"the object store could not complete it ({code})")

    def abort_upload(self, key: str, upload: str) -> None:
        """Have the store drop the parts. Raises NoSuchUploadError."""
        self._request("DELETE", key, {"uploadId": upload}, what=f"ending an upload of {key}")

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Key and id of the multipart uploads under way of objects whose keys begin so."""
        markers = {"NextKeyMarker": "key-marker", "NextUploadIdMarker": "upload-id-marker"}
        pages = self._pages("", {"uploads": "", "prefix": prefix}, markers, what="listing its uploads")
        return [(entry.findtext("Key", ""), entry.findtext("UploadId", "")) for page in pages for entry in page.iter("Upload")]

    def _pages(self, key: str, query: Mapping[str, str], markers: Mapping[str, str], *, what: str) -> Iterator[ET.Element]:
        """All pages of a listing. `markers`: by element of a page, the query's name for where the next page begins."""
        after: dict[str, str] = {}
        while True:
            page = self._document(self._request("GET", key, {**query, **after}, what=what))
            yield page
            following = {name: page.findtext(element) or "" for element, name in markers.items()}
            if page.findtext("IsTruncated") != "true" or not any(following.values()):
                return
            if following == after:
                raise TransientError(f"the object store gives the same page again and again ({what})")
            after = following

    def _request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        *,
        what: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> HttpResponse:
        answer = self._send(method, key, query, headers or {}, body)
        if answer.status == NOT_FOUND and _code(answer) == "NoSuchUpload":
            raise NoSuchUploadError
        self._check(answer, what)
        return answer

    def _send(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> HttpResponse:
        url = f"{self._url}/{encoded_path(key)}" if key else self._url
        if query:
            url += f"?{encoded_query(query)}"
        sent = dict(headers or {})
        if self._keys is not None:
            digest = EMPTY_SHA256 if body is None else hashlib.sha256(body).hexdigest()
            sent = signed_headers(
                method, url, sent, payload_sha256=digest, keys=self._keys, region=self._region, now=datetime.now(UTC)
            )
        return self._wire.send(method, url, sent, body)

    def _check(self, answer: HttpResponse, what: str) -> None:
        """Raise where the request failed. The answer's own words are not passed on: they hold what was signed."""
        if answer.succeeded:
            return
        code = _code(answer)
        said = f" (HTTP status {answer.status}{f', {code}' if code else ''}, {what})"
        if code in _FULL_CODES or answer.status in FULL:
            raise out_of_space(self.shown, said)
        passing = answer.transient_failure
        if passing is not None:
            raise passing
        if code in _PASSING_CODES:
            raise TransientError(f"the object store could not do it{said}")
        if code == "RequestTimeTooSkewed":
            raise DestinationRefusedError(f"{self.shown}: says that this machine's clock is wrong{said}", "set the node's clock")
        if answer.status in DENIED:
            holds = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, on your own machine the variables of these names"
            raise access_denied(self.shown, said, signed=self._keys is not None, secret_holds=holds)
        if answer.status == NOT_FOUND:
            raise target_not_found(self.shown, said, "bucket")
        raise DestinationRefusedError(
            f"{self.shown}: the object store refuses the request{said}",
            "check s3Endpoint and s3Region of the profile's spec.publish",
        )

    def _document(self, answer: HttpResponse) -> ET.Element:
        """The XML of an answer, its elements without their namespace."""
        try:
            document = ET.fromstring(answer.content)  # noqa: S314 - of the store that the user names; expat bounds entities
        except ET.ParseError:
            raise DestinationRefusedError(
                f"{self.shown}: answers with something that is not XML", "check s3Endpoint of the profile's spec.publish"
            ) from None
        for element in document.iter():
            element.tag = element.tag.rpartition("}")[2]
        return document


def _number(entry: ET.Element, name: str) -> int:
    text = entry.findtext(name, "")
    if not (text.isascii() and text.isdigit()):
        raise TransientError(f"the object store gives no {name} in a listing")
    return int(text)


def _code(answer: HttpResponse) -> str | None:
    found = _CODE.search(answer.content)
    return found[1].decode() if found and b"<Error>" in answer.content else None
