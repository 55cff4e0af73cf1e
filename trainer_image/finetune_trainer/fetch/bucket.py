"""`s3://` sources, asked for with obstore: an object, or all objects below a prefix, each read in the version that was listed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import obstore
from obstore.exceptions import (
    BaseError,
    GenericError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore, S3Store

from finetune_job.api.base import BucketPath
from finetune_trainer.credentials import S3Keys
from finetune_trainer.errors import TrainerError
from finetune_trainer.fetch.source import RemoteFile, SourceUnavailableError
from finetune_trainer.network.certificates import untrusted_certificate
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.http_status import ABSENT, DENIED, RETRYABLE
from finetune_trainer.network.retry import TransientError

RANGE_BYTES = 16 * 1024**2
"""Of one request: many at once are what an object store is fast with."""
RANGES_AT_ONCE = 4
"""Requests in flight for one file; with eight files at a time they hold half a gibibyte at most."""
_CONNECT = timedelta(seconds=30)
_REQUEST = timedelta(seconds=300)
"""For one range, so that a line of half a megabit per second is still fast enough."""
_STATUS = re.compile(r"status code: (\d\d\d)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")


def open_bucket(bucket: str, service: S3Service, keys: S3Keys | None) -> ObjectStore:
    """A bucket; without keys, requests are not signed, as public buckets allow."""
    settings: dict[str, str] = {"region": service.region}
    if service.address:
        settings["endpoint"] = service.address
    if keys is not None:
        settings |= {"access_key_id": keys.access_key_id, "secret_access_key": keys.secret_access_key}
        if keys.session_token is not None:
            settings["session_token"] = keys.session_token
    return S3Store(
        bucket,
        config=settings,  # type: ignore[arg-type]
        skip_signature=keys is None,
        client_options={
            "allow_http": service.is_plain_http,
            "connect_timeout": _CONNECT,
            "timeout": _REQUEST,
        },
        # Failures are counted, told and waited for in one place: network/retry.py.
        retry_config={"max_retries": 0},
    )


class BucketPrefix:
    """One object, or the objects below a prefix."""

    def __init__(self, store: ObjectStore, place: BucketPath, field: str, refusal: type[TrainerError], *, signed: bool) -> None:
        """`field`: where the manifest names the source. `refusal`: what is raised where the source is not there or not for us.
        `signed`: whether there are credentials.
        """
        self._store, self._place, self._refusal, self._signed = store, place, refusal, signed
        self._shown = f"{field}: s3://{place.bucket}/{place.prefix}"

    def files(self) -> list[RemoteFile]:
        """The object of that name, else everything below it. Raises TransientError, TrainerError."""
        try:
            single = self._single()
            if single is not None:
                return [single]
            prefix = f"{self._place.prefix}/" if self._place.prefix else ""
            found = [
                self._remote_file(meta, str(meta["path"]).removeprefix(prefix))
                for page in obstore.list(self._store, self._place.prefix or None)
                for meta in page
                if str(meta["path"]) != self._place.prefix and not str(meta["path"]).endswith("/")
            ]
        except (BaseError, OSError, ValueError) as error:
            raise self._failure(error) from None
        if not found:
            raise self._refusal(
                f"{self._shown}: there is no such object and nothing below it", "correct the bucket or the prefix"
            )
        return found

    def _single(self) -> RemoteFile | None:
        if not self._place.prefix:
            return None
        try:
            meta = obstore.head(self._store, self._place.prefix)
        except (FileNotFoundError, PermissionDeniedError, UnauthenticatedError):
            # Who may list but not read, and who names a prefix, both learn what is wrong from the listing.
            return None
        return self._remote_file(meta, self._place.prefix.rpartition("/")[2])

    def _remote_file(self, meta: obstore.ObjectMeta, path: str) -> RemoteFile:
        tag = meta["e_tag"]
        if not tag:
            raise SourceUnavailableError(
                f"{self._shown}: {meta['path']} has no ETag, so that a change of it could not be seen", "use another object store"
            )
        return RemoteFile(path=path, size=meta["size"], version=tag, address=meta["path"])

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes | memoryview]:
        """The bytes from `offset` on, some ranges ahead. Raises TransientError, TrainerError."""
        starts = iter(range(offset, file.size, RANGE_BYTES))
        ahead: deque[Future[obstore.Bytes]] = deque()
        executor = ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="range")
        try:
            for start in starts:
                ahead.append(executor.submit(self._range, file, start, min(start + RANGE_BYTES, file.size)))
                if len(ahead) == RANGES_AT_ONCE:
                    yield memoryview(ahead.popleft().result())
            while ahead:
                yield memoryview(ahead.popleft().result())
        except (BaseError, OSError, ValueError) as error:
            raise self._failure(error) from None
        finally:
            executor.shutdown(cancel_futures=True)

    def _range(self, file: RemoteFile, start: int, end: int) -> obstore.Bytes:
        answer = obstore.get(self._store, file.address, options={"range": (start, end), "if_match": file.version})
        return answer.bytes()

    def _failure(self, error: Exception) -> Exception:
        match error:
            case PermissionDeniedError() | UnauthenticatedError():
                return self._denied("")
            case FileNotFoundError():
                return self._not_found("")
            case PreconditionError():
                return SourceUnavailableError(
                    f"{self._shown}: an object changed while it was copied", "let nothing write below the prefix during a run"
                )
            case InvalidPathError() | ValueError():
                return self._refusal(f"{self._shown}: holds a key that is not a path", "rename the object")
        # The text itself is not passed on: it holds what was sent, down to the string that was signed.
        text = str(error) if isinstance(error, GenericError) else ""
        status, code = _STATUS.search(text), _CODE.search(text)
        if status is None:
            return untrusted_certificate(error) or TransientError(f"the object store did not answer ({type(error).__name__})")
        said = f" (HTTP status {status[1]}{f', {code[1]}' if code else ''})"
        match int(status[1]):
            case number if number in RETRYABLE:
                return TransientError(f"the object store is busy or broken{said}")
            case number if number in DENIED:
                return self._denied(said)
            case number if number in ABSENT:
                return self._not_found(said)
        return SourceUnavailableError(
            f"{self._shown}: the object store refuses the request{said}",
            "check s3Endpoint and s3Region of the profile's spec.fetch",
        )

    def _not_found(self, said: str) -> Exception:
        return self._refusal(f"{self._shown}: there is no such bucket or object{said}", "correct the bucket or the key")

    def _denied(self, said: str) -> Exception:
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        if self._signed:
            hint = f"the keys of spec.fetch.s3SecretRef (on your own machine: {keys}) may not list and read it"
        else:
            hint = f"name a Secret with {keys} in spec.fetch.s3SecretRef (on your own machine: set them)"
        return self._refusal(f"{self._shown}: access is refused{said}", hint)
