"""`s3://` destinations: an object for each file below the prefix, SHA256SUMS last.

A prefix belongs to one release. A reader that sees SHA256SUMS there sees everything it names; before that, the prefix has none.
Nothing is ever overwritten: a prefix with another release, or with other objects, is refused, and every object is written only if
there is none with its key (`If-None-Match: *`), so that one of two simultaneous publications is refused, too.

Every object has the SHA-256 of its file as metadata, and the store itself compares the body of each signed request with the
digest in the signature. So an existing object with the right digest is not sent again, nor is a part of an unfinished upload that
the store still lists with the ETag that it gave for the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from boto3.session import Session

from finetune_job.api.base import BucketPath
from finetune_trainer.errors import CheckpointError, DestinationRefusedError, DestinationUnavailableError
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.object_store import open_store
from finetune_trainer.network.retry import RetryPolicy, with_retries
from finetune_trainer.publish.destination import DESTINATION_FIELD, Publication, destination_unavailable
from finetune_trainer.publish.resumable import ProvenReader, UploadJournal, read_proven
from finetune_trainer.publish.s3_client import Bucket, ExistsError, NoSuchUploadError, StoredObject
from finetune_trainer.release.files import Release, ReleaseFile

log = logging.getLogger(__name__)
T = TypeVar("T")
PART_BYTES = 16 * 1024**2
"""Bytes of a part of a multipart upload; larger if a file would have more than MOST_PARTS."""
MOST_PARTS = 10_000
"""Largest number of parts of one object: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""
PARTS_AT_ONCE = 4
"""Parts that are sent at a time, and held in memory."""
_SHOWN_KEYS = 3


def part_size(file_bytes: int, part_bytes: int) -> int:
    """Bytes of a part, so that the file has no more than MOST_PARTS."""
    return max(part_bytes, -(-file_bytes // MOST_PARTS))


class BucketDestination:
    """The objects below one prefix."""

    def __init__(
        self,
        place: BucketPath,
        service: S3Service,
        session: Session | None,
        journal: UploadJournal,
        stop: threading.Event,
        *,
        patience: RetryPolicy | None = None,
    ) -> None:
        """session: boto3's, with credentials; None: requests are not signed."""
        self._place, self._journal, self._stop = place, journal, stop
        self._patience = patience or RetryPolicy()
        client = open_store(service, session, connections=PARTS_AT_ONCE)
        self._bucket = Bucket(client, place.bucket, stop, signed=session is not None)
        self._prefix = f"{place.prefix.rstrip('/')}/" if place.prefix else ""
        self._address = f"s3://{place.bucket}/{self._prefix}".rstrip("/")

    def publish(self, release: Release) -> Publication:
        """See Destination."""
        try:
            return self._publish(release)
        finally:
            self._bucket.close()

    def _publish(self, release: Release) -> Publication:
        files = {self._prefix + file.name: file for file in release.files}
        manifest = self._prefix + release.manifest.name
        there = self._existing_keys(release, set(files) | {manifest})
        self._abort_orphans(files)
        for key, file in files.items():
            self._upload_file(key, file, exists=key in there)
        self._prove_all(files)
        if manifest not in there:
            try:
                self._put(manifest, release.manifest)
            except ExistsError:  # another publication was faster, or an earlier request, whose answer was lost
                self._check_manifest(manifest, release.manifest)
        self._journal.forget()
        return Publication(
            address=f"{self._address}@sha256:{release.manifest.sha256}",
            digest=release.manifest.sha256,
            bytes_sent=self._bucket.bytes_sent,
        )

    def _existing_keys(self, release: Release, ours: set[str]) -> set[str]:
        """Keys of the release that already exist. Raises DestinationRefusedError if other objects exist."""
        listed = self._with_retries("listing what is there", lambda: self._bucket.list_objects(self._prefix))
        # Consoles create an empty object to show a directory.
        keys = {key for key, size in listed.items() if not (key.endswith("/") and size == 0)}
        manifest = self._prefix + release.manifest.name
        if manifest in keys:
            self._check_manifest(manifest, release.manifest)
        foreign = sorted(keys - ours)
        if foreign:
            more = f" and {len(foreign) - _SHOWN_KEYS} more" if len(foreign) > _SHOWN_KEYS else ""
            raise self._occupied(f"holds what does not belong to this release: {', '.join(foreign[:_SHOWN_KEYS])}{more}")
        return keys

    def _check_manifest(self, key: str, manifest: ReleaseFile) -> None:
        """Raise DestinationRefusedError if the existing list of files is another one."""
        content = self._with_retries(f"reading {key}", lambda: self._bucket.get(key, manifest.size + 1))
        if hashlib.sha256(content).hexdigest() != manifest.sha256:
            raise self._occupied(f"holds another release: its {manifest.name} differs")

    def _put(self, key: str, file: ReleaseFile) -> None:
        """Write a small object. Raises ExistsError."""
        content = read_proven(file)
        self._with_retries(f"writing {key}", lambda: self._bucket.put(key, content, file.sha256))

    def _occupied(self, why: str) -> DestinationRefusedError:
        return DestinationRefusedError(
            f"{DESTINATION_FIELD}: {self._address} {why}",
            "nothing there was changed: name a prefix that is empty, or delete what is below this one",
        )

    def _abort_orphans(self, files: dict[str, ReleaseFile]) -> None:
        """End uploads of our files that no journal knows: a kill came before the id was recorded, or the workspace is another
        one.
        """
        try:
            under_way = self._with_retries("listing uploads", lambda: self._bucket.uploads(self._prefix))
        except DestinationRefusedError as error:
            # This needs a separate permission, and only the cost of abandoned parts depends on it.
            log.warning("uploads that were abandoned cannot be ended: %s", error)
            return
        for key, upload in under_way:
            if key in files and upload != self._journal.recall(_upload_name(key, files[key])):
                self._with_retries(f"ending an upload of {key}", lambda: self._abort(key, upload))  # noqa: B023
                log.info("%s: ended an abandoned upload", key)

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._bucket.abort_upload(key, upload)
        except NoSuchUploadError:
            log.debug("%s: the upload has ended already", key)

    def _stored(self, key: str) -> StoredObject | None:
        return self._with_retries(f"looking at {key}", lambda: self._bucket.head(key))

    def _is_there(self, key: str, file: ReleaseFile) -> bool:
        """Whether the object exists. Raises DestinationRefusedError if it is another object."""
        stored = self._stored(key)
        if stored is not None and (stored.size, stored.sha256) != (file.size, file.sha256):
            raise self._occupied(f"holds another {file.name} ({stored.size} bytes, sha256 {stored.sha256 or 'not announced'})")
        return stored is not None

    def _upload_file(self, key: str, file: ReleaseFile, *, exists: bool) -> None:
        if exists and self._is_there(key, file):
            return
        if file.size <= PART_BYTES:
            try:
                self._put(key, file)
            except ExistsError:
                self._is_there(key, file)
        else:
            # An upload is lost when another process ends it, or when it was completed but the answer was lost.
            for _ in range(self._patience.attempts):
                try:
                    self._upload_in_parts(key, file)
                    break
                except NoSuchUploadError:
                    self._journal.remember(_upload_name(key, file), "")
                    if self._is_there(key, file):
                        break
                    log.warning("%s: the upload is gone, and begins again", key)
            else:
                raise DestinationUnavailableError(
                    f"{self._address}: uploads of {file.name} are ended again and again",
                    "let nothing else write below the prefix",
                )
        log.info("%s: %s is there, %d bytes", self._address, file.name, file.size)

    def _upload_in_parts(self, key: str, file: ReleaseFile) -> None:
        """Upload a large file. Raises NoSuchUploadError."""
        name = _upload_name(key, file)
        upload, kept = self._journal.recall(name), dict[int, str]()
        if upload is None:
            upload = self._with_retries(f"writing {key}", lambda: self._bucket.create_upload(key, file.sha256))
            self._journal.remember(name, upload)
        else:
            kept = self._with_retries(f"listing the parts of {key}", lambda: self._bucket.parts(key, upload))
        try:
            tags = self._send_parts(key, file, upload, kept)
        except CheckpointError:
            self._with_retries(f"ending the upload of {key}", lambda: self._abort(key, upload))
            self._journal.remember(name, "")
            raise
        try:
            self._with_retries(f"completing {key}", lambda: self._bucket.complete_upload(key, upload, tags))
        except ExistsError:
            self._with_retries(f"ending the upload of {key}", lambda: self._abort(key, upload))
            self._is_there(key, file)
        self._journal.remember(name, "")

    def _send_parts(self, key: str, file: ReleaseFile, upload: str, kept: dict[int, str]) -> dict[int, str]:
        """Send the missing parts; returns ETags of all parts. Raises NoSuchUploadError."""
        size = part_size(file.size, PART_BYTES)
        tags: dict[int, str] = {}
        running: deque[tuple[int, Future[str]]] = deque()
        with ProvenReader(file, self._stop) as reader, ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="part") as pool:
            try:
                for number in range(1, -(-file.size // size) + 1):
                    content = reader.read(size)
                    proof = f"{upload} {number} {hashlib.sha256(content).hexdigest()}"
                    if number in kept and self._journal.recall(proof) == kept[number]:
                        tags[number] = kept[number]
                        continue
                    if len(running) == PARTS_AT_ONCE:
                        done, future = running.popleft()
                        tags[done] = future.result()
                    running.append((number, pool.submit(self._send_part, key, upload, number, content, proof)))
                return tags | {number: future.result() for number, future in running}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _send_part(self, key: str, upload: str, number: int, content: bytes, proof: str) -> str:
        tag = self._with_retries(f"part {number} of {key}", lambda: self._bucket.upload_part(key, upload, number, content))
        self._journal.remember(proof, tag)
        return tag

    def _prove_all(self, files: dict[str, ReleaseFile]) -> None:
        """Check that everything that SHA256SUMS will name is there, whoever wrote it."""
        for key, file in files.items():
            if not self._is_there(key, file):
                raise DestinationUnavailableError(
                    f"{self._address}: {file.name} was there and is gone", "let nothing else write below the prefix"
                )

    def _with_retries(self, what: str, operation: Callable[[], T]) -> T:
        return with_retries(f"{self._address}: {what}", self._patience, self._stop, destination_unavailable, operation)


def _upload_name(key: str, file: ReleaseFile) -> str:
    return f"{key} {file.sha256}"
