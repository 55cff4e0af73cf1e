"""`hf://` destinations: large files are sent first, then one commit makes all files visible at once.

Files that the Hub already has are not sent again, so a killed publication resumes where it stopped. Files are sent with the large
file storage protocol, not with Xet: Xet is a second stack of libraries with its own proxies, caches, buffers and log lines, which
this image neither bounds nor tests. Its advantage, sending only the changed parts of a file, does not help with new weights.

Importing this module imports huggingface_hub, which then reads its settings from the environment (network/environment.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.lfs import UploadInfo
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, hf_raise_for_status  # type: ignore[attr-defined]

from finetune_job.api.base import HubPath
from finetune_trainer.errors import DestinationRefusedError, DestinationUnavailableError
from finetune_trainer.network.http_status import ABSENT, DENIED
from finetune_trainer.network.hub_answers import SILENCE_SECONDS, call_hub, redacted_message, transient_failure
from finetune_trainer.network.retry import RetryPolicy, with_retries
from finetune_trainer.publish.destination import DESTINATION_FIELD, Publication, access_denied, destination_unavailable
from finetune_trainer.publish.hub_changes import CommitChanges, ForeignModelError, StoredFile, changes_for, is_stored
from finetune_trainer.publish.resumable import ProvenReader, upload_all
from finetune_trainer.release.files import CHECKSUMS, Release, ReleaseFile

log = logging.getLogger(__name__)
T = TypeVar("T")

SECRET_HOLDS = "a write token under `token`; on your own machine: HF_TOKEN"  # noqa: S105 - words for people
UPLOADS = 4
"""Number of files that are sent at the same time; each takes a few megabytes of memory."""
COMMIT_ATTEMPTS = 4
"""Maximum number of times that a commit is tried if other commits keep coming in between."""
_CONFLICT = frozenset({409, 412})
_SAMPLE_BYTES = 512
"""Number of bytes at a file's beginning from which the Hub decides where to keep the file."""

constants.HF_HUB_DISABLE_XET = True


class HubDestination:
    """The main branch of one model repository."""

    def __init__(
        self,
        place: HubPath,
        *,
        token: str | None,
        endpoint: str | None,
        private: bool,
        patience: RetryPolicy | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """private: whether a new repository is private. endpoint: None for the library's default. stop: ends the publication."""
        self._repository, self._token, self._private = place.repository, token, private
        self._patience = patience or RetryPolicy()
        # False: no token at all, not even one from a login in the home directory.
        self._api = HfApi(endpoint=endpoint, token=token or False)
        self._shown = f"{DESTINATION_FIELD}: model {place.repository} on the Hub"
        self._stop = stop or threading.Event()
        disable_progress_bars()

    def publish(self, release: Release) -> Publication:
        """Publish as `Destination.publish` describes. If another commit comes in between, the changes are determined again.

        Also raises StoppedError.
        """
        create = self._api.create_repo
        self._with_retries("creating the repository", lambda: create(self._repository, private=self._private, exist_ok=True))
        bytes_sent = 0
        for _ in range(COMMIT_ATTEMPTS):
            head, changes = self._with_retries("looking at what is there", lambda: self._missing(release))
            if not changes.added and not changes.deleted:
                return self._publication(head, bytes_sent)
            # Large files go to large-file storage; small files are sent with the commit.
            sent = upload_all(self._upload_one, changes.added, UPLOADS, self._stop)
            bytes_sent += sum(size for _, size in sent)
            additions = [addition for addition, _ in sent]
            commit = self._with_retries("the commit", lambda: self._commit(release, head, additions, changes.deleted))  # noqa: B023
            if commit is not None:
                stored = self._with_retries("looking at the commit", lambda: self._checked(release, commit))  # noqa: B023
                bytes_sent += sum(file.size for file in changes.added if stored[file.name].sha256 is None)
                return self._publication(commit, bytes_sent)
            log.info("%s: another commit came in between", self._shown)
        raise DestinationUnavailableError(
            f"{self._shown}: others keep committing to it", "publish when nothing else writes there"
        )

    def _publication(self, commit: str, bytes_sent: int) -> Publication:
        return Publication(address=f"hf://{self._repository}@{commit}", digest=commit, bytes_sent=bytes_sent)

    def _missing(self, release: Release) -> tuple[str, CommitChanges]:
        """Return the newest commit, and the changes that turn its files into the release."""
        head = self._api.repo_info(self._repository).sha
        if head is None:
            raise DestinationUnavailableError(
                f"{self._shown}: the Hub names no commit", "check the profile's spec.publish.hubEndpoint"
            )
        stored = self._stored(head)
        older = None
        if any(file.path == CHECKSUMS for file in stored):
            url = hf_hub_url(self._repository, CHECKSUMS, revision=head, endpoint=self._api.endpoint)
            response = get_session().get(url, headers=build_hf_headers(token=self._token or False), follow_redirects=True)
            hf_raise_for_status(response)
            older = response.content.decode(errors="replace")
        try:
            return head, changes_for(release, stored, older)
        except ForeignModelError as error:
            raise DestinationRefusedError(
                f"{self._shown}: {error}, which no run of this operator put there. Loaders would mix it with the new model",
                f"name another repository in {DESTINATION_FIELD}, or delete these files",
            ) from None

    def _stored(self, commit: str) -> list[StoredFile]:
        tree = self._api.list_repo_tree(self._repository, recursive=True, revision=commit)
        return [
            StoredFile(entry.path, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs is not None else None)
            for entry in tree
            if isinstance(entry, RepoFile)
        ]

    def _upload_one(self, file: ReleaseFile) -> tuple[CommitOperationAdd, int]:
        """Send a file if it is large; return its entry for the commit and the number of bytes that were sent."""
        with ProvenReader(file, self._stop) as reader:
            addition = CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=b"")
            # This is the digest of the verified bytes; without it the library would hash the whole file again.
            addition.upload_info = UploadInfo(
                size=file.size, sha256=bytes.fromhex(file.sha256), sample=reader.read(_SAMPLE_BYTES)
            )
            addition.path_or_fileobj = reader  # type: ignore[assignment]
            reader.bytes_read = 0

            def send() -> None:
                # After a failed request, the library leaves the file where it stopped, so each attempt starts from the beginning.
                reader.seek(0)
                self._api.preupload_lfs_files(self._repository, [addition], num_threads=1)

            self._with_retries(f"sending {file.name}", send)
            bytes_sent = reader.bytes_read
            if addition.path_or_fileobj != b"":  # the library drops the content that it has sent
                # The file is too small for large-file storage, so the commit carries its content, unless the file is ignored.
                reader.seek(0)
                addition.path_or_fileobj = b"" if addition._should_ignore else reader.read()  # noqa: SLF001 - no public name
        log.info("%s: %s is ready, %d bytes were sent", self._shown, file.name, bytes_sent)
        return addition, bytes_sent

    def _commit(self, release: Release, head: str, additions: list[CommitOperationAdd], deleted: tuple[str, ...]) -> str | None:
        """Return the new commit, or None if the repository's head has changed meanwhile."""
        facts = release.facts
        try:
            created = self._api.create_commit(
                self._repository,
                [*additions, *(CommitOperationDelete(path_in_repo=path, is_folder=False) for path in deleted)],
                commit_message=f"{facts.get('job', 'Fine-tuned model')}: {facts.get('method', 'fine-tuning')}",
                commit_description="\n".join(f"{name}: {value}" for name, value in sorted(facts.items())),
                parent_commit=head,
            )
        except HfHubHTTPError as error:
            if error.response.status_code in _CONFLICT:
                return None
            raise
        return str(created.oid)

    def _checked(self, release: Release, commit: str) -> dict[str, StoredFile]:
        """Return the files of the commit. Raises DestinationRefusedError if it lacks a file of the release."""
        stored = {file.path: file for file in self._stored(commit)}
        lacking = [file.name for file in (*release.files, release.manifest) if not is_stored(file, stored.get(file.name))]
        if lacking:
            raise DestinationRefusedError(
                f"{self._shown}: commit {commit} lacks {lacking[:3]} of the {len(release.files) + 1} files sent",
                "the repository's .gitignore may leave them out: delete it there, or name another repository",
            )
        return stored

    def _with_retries(self, what: str, operation: Callable[[], T]) -> T:
        def once() -> T:
            # The timeout is set each time, because the library creates a new session after a failure.
            get_session().timeout = httpx2.Timeout(SILENCE_SECONDS)
            try:
                return call_hub(operation)
            except HfHubHTTPError as error:
                raise self._failure(what, error) from None
            except ValueError as error:
                raise DestinationRefusedError(
                    f"{self._shown}: {what}{redacted_message(str(error))}", "see what the Hub says; its storage may be full"
                ) from None

        return with_retries(f"{self._shown}: {what}", self._patience, self._stop, destination_unavailable, once)

    def _failure(self, what: str, error: HfHubHTTPError) -> Exception:
        status = error.response.status_code
        transient = transient_failure(error.response, self._api.endpoint)
        if transient is not None:
            return transient
        detail = f" (HTTP status {status}){redacted_message(error.server_message)}"
        if status in DENIED | ABSENT:
            # The Hub gives the same answer for a private repository as for a missing one, so both are reported alike.
            return access_denied(f"{self._shown}: {what}", detail, signed=self._token is not None, secret_holds=SECRET_HOLDS)
        return DestinationRefusedError(
            f"{self._shown}: {what} is refused{detail}", f"see what the Hub says, and check {DESTINATION_FIELD}"
        )
