"""`s3://` destinations: each file becomes an object below the prefix, SHA256SUMS last.

A prefix belongs to one release. A reader that sees SHA256SUMS there also sees every file that it names.
Nothing is ever overwritten: a prefix with another release, or with other objects, is refused, and an object is written only if
its key does not exist yet (`If-None-Match: *`), so one of two simultaneous publications is also refused.

Every object has the SHA-256 of its file as metadata, and the store itself compares the body of each signed request with the
digest in the signature. So an existing object with the right digest is not sent again. Nor is a part of an unfinished upload, if
the store still lists that part with the ETag that it returned for the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from boto3.session import Session

from finetune_job.api.base import BucketPath
from finetune_trainer.errors import CheckpointError, DestinationRefusedError, DestinationUnavailableError
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.object_store import open_store
from finetune_trainer.network.retry import RetryPolicy
from finetune_trainer.publish.destination import DESTINATION_FIELD, Publication
from finetune_trainer.publish.resumable import ProvenReader, UploadJournal, read_proven
from finetune_trainer.publish.s3_client import Bucket, ExistsError, NoSuchUploadError
from finetune_trainer.release.files import Release, ReleaseFile

log = logging.getLogger(__name__)
PART_BYTES = 16 * 1024**2
"""Bytes in each part of a multipart upload; parts are larger if there would otherwise be more than MOST_PARTS."""
MOST_PARTS = 10_000
"""Maximum number of parts of one object: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""
PARTS_AT_ONCE = 4
"""Number of parts that are sent, and held in memory, at the same time."""
_SHOWN_KEYS = 3


def part_size(file_bytes: int, part_bytes: int) -> int:
    """Return the smallest part size, from `part_bytes` up, that gives the file at most MOST_PARTS parts."""
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
        """session: boto3's session with credentials; None: requests are not signed."""
        self._place, self._journal, self._stop = place, journal, stop
        self._patience = patience or RetryPolicy()
        client = open_store(service, session, connections=PARTS_AT_ONCE)
        self._bucket = Bucket(client, place.bucket, stop, self._patience, signed=session is not None)
        self._prefix = f"{place.prefix.rstrip('/')}/" if place.prefix else ""
        self._address = f"s3://{place.bucket}/{self._prefix}".rstrip("/")

    def publish(self, release: Release) -> Publication:
        """Publish as `Destination.publish` describes."""
        try:
            return self._publish(release)
        finally:
            self._bucket.close()

    def _publish(self, release: Release) -> Publication:
        files = {self._prefix + file.name: file for file in release.files}
        manifest = self._prefix + release.manifest.name
        existing = self._existing_keys(release, set(files) | {manifest})
        self._abort_orphans(files)
        for key, file in files.items():
            self._upload_file(key, file, exists=key in existing)
        for key, file in files.items():
            # SHA256SUMS may name only files that are really there, no matter who wrote them.
            if not self._is_there(key, file):
                raise DestinationUnavailableError(
                    f"{self._address}: {file.name} existed and is gone", "let nothing else write below the prefix"
                )
        if manifest not in existing:
            try:
                self._bucket.put(manifest, read_proven(release.manifest), release.manifest.sha256)
            except ExistsError:  # another publication was faster, or an earlier request succeeded but its answer was lost
                self._check_manifest(manifest, release.manifest)
        self._journal.forget()
        return Publication(
            address=f"{self._address}@sha256:{release.manifest.sha256}",
            digest=release.manifest.sha256,
            bytes_sent=self._bucket.bytes_sent,
        )

    def _existing_keys(self, release: Release, ours: set[str]) -> set[str]:
        """Return the keys of the release that already exist. Raises DestinationRefusedError if there are other objects."""
        listed = self._bucket.list_objects(self._prefix)
        # Consoles create an empty object to show a directory. It does not count as content.
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
        """Raise DestinationRefusedError if the existing list of files differs from ours."""
        content = self._bucket.get(key, manifest.size + 1)
        if hashlib.sha256(content).hexdigest() != manifest.sha256:
            raise self._occupied(f"holds another release: its {manifest.name} differs")

    def _occupied(self, why: str) -> DestinationRefusedError:
        return DestinationRefusedError(
            f"{DESTINATION_FIELD}: {self._address} {why}",
            "nothing there was changed: name a prefix that is empty, or delete what is below this one",
        )

    def _abort_orphans(self, files: dict[str, ReleaseFile]) -> None:
        """Abort uploads of our files that the journal lacks: a kill came before the id was recorded, or the workspace is new."""
        try:
            under_way = self._bucket.uploads(self._prefix)
        except DestinationRefusedError as error:
            # Listing uploads needs a separate permission. Without it, abandoned parts just keep costing money.
            log.warning("abandoned uploads cannot be aborted: %s", error)
            return
        for key, upload in under_way:
            if key in files and upload != self._journal.recall(_upload_name(key, files[key])):
                self._bucket.abort_upload(key, upload)
                log.info("%s: aborted an abandoned upload", key)

    def _is_there(self, key: str, file: ReleaseFile) -> bool:
        """Whether the object exists. Raises DestinationRefusedError if its content differs."""
        stored = self._bucket.head(key)
        if stored is not None and (stored.size, stored.sha256) != (file.size, file.sha256):
            raise self._occupied(f"holds another {file.name} ({stored.size} bytes, sha256 {stored.sha256 or 'not announced'})")
        return stored is not None

    def _upload_file(self, key: str, file: ReleaseFile, *, exists: bool) -> None:
        if exists and self._is_there(key, file):
            return
        if file.size <= PART_BYTES:
            try:
                self._bucket.put(key, read_proven(file), file.sha256)
            except ExistsError:
                self._is_there(key, file)
        else:
            # An upload is lost when another process aborts it, or when it was completed but the answer was lost.
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
                    f"{self._address}: uploads of {file.name} are aborted again and again",
                    "let nothing else write below the prefix",
                )
        log.info("%s: %s is there, %d bytes", self._address, file.name, file.size)

    def _upload_in_parts(self, key: str, file: ReleaseFile) -> None:
        """Upload a large file. Raises NoSuchUploadError."""
        name = _upload_name(key, file)
        upload, kept = self._journal.recall(name), dict[int, str]()
        if upload is None:
            upload = self._bucket.create_upload(key, file.sha256)
            self._journal.remember(name, upload)
        else:
            kept = self._bucket.parts(key, upload)
        try:
            tags = self._send_parts(key, file, upload, kept)
        except CheckpointError:
            self._bucket.abort_upload(key, upload)
            self._journal.remember(name, "")
            raise
        try:
            self._bucket.complete_upload(key, upload, tags)
        except ExistsError:
            self._bucket.abort_upload(key, upload)
            self._is_there(key, file)
        self._journal.remember(name, "")

    def _send_parts(self, key: str, file: ReleaseFile, upload: str, kept: dict[int, str]) -> dict[int, str]:
        """Send the missing parts and return the ETags of all parts. Raises NoSuchUploadError."""
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
        tag = self._bucket.upload_part(key, upload, number, content)
        self._journal.remember(proof, tag)
        return tag


def _upload_name(key: str, file: ReleaseFile) -> str:
    return f"{key} {file.sha256}"
