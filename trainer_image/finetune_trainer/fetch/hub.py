"""Reads `hf://` sources with huggingface_hub: one commit of a repository, whose listing has the digest of every file.

Importing this module imports huggingface_hub, which then reads its settings from the environment (network/environment.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
from huggingface_hub import HfApi, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from finetune_job.api.base import HUB_DATASETS, HubPath
from finetune_trainer.errors import DataError, TrainerError
from finetune_trainer.fetch.source import Digest, DigestKind, RemoteFile, SourceUnavailableError
from finetune_trainer.network.certificates import untrusted_certificate
from finetune_trainer.network.http_status import ABSENT, DENIED
from finetune_trainer.network.hub_answers import SILENCE_SECONDS, call_hub, transient_failure
from finetune_trainer.network.retry import TransientError


class HubRepository:
    """One repository at one commit."""

    def __init__(
        self, place: HubPath, revision: str, *, token: str | None, endpoint: str | None, field: str, refusal: type[TrainerError]
    ) -> None:
        """field: the manifest's field for the source. refusal: error to raise if the source is missing or access is denied."""
        self._place, self._revision, self._token, self._refusal = place, revision, token, refusal
        self._kind = "dataset" if place.is_dataset else "model"
        self._shown = f"{field}: {self._kind} {place.repository} at {revision}"
        # False means no token; None would mean the token that a login stored in the home directory.
        self._api = HfApi(endpoint=endpoint, token=token or False)
        get_session().timeout = httpx2.Timeout(SILENCE_SECONDS)

    def files(self) -> list[RemoteFile]:
        """List the files below the named path. Raises TransientError, TrainerError."""
        try:
            return call_hub(lambda: [self._remote_file(entry) for entry in self._entries()])
        except HfHubHTTPError as error:
            raise self._failure(error.response) from None

    def _entries(self) -> list[RepoFile]:
        repository, path = self._place.repository, self._place.path
        commit = self._api.repo_info(repository, revision=self._revision, repo_type=self._kind).sha
        if commit != self._revision:
            message = f"{self._shown}: the Hub answers with commit {commit}"
            raise SourceUnavailableError(message, "check the endpoint of the profile's spec.fetch.hubEndpoint")
        if path:
            named = self._api.get_paths_info(repository, [path], revision=self._revision, repo_type=self._kind)
            if not named:
                raise self._refusal(f"{self._shown} holds no {path}", "correct the path, or the revision")
            if isinstance(named[0], RepoFile):
                return [named[0]]
        tree = self._api.list_repo_tree(repository, path or None, recursive=True, revision=self._revision, repo_type=self._kind)
        return [entry for entry in tree if isinstance(entry, RepoFile)]

    def _remote_file(self, entry: RepoFile) -> RemoteFile:
        path = entry.path
        if self._place.path:
            is_named = path == self._place.path
            path = path.rpartition("/")[2] if is_named else path.removeprefix(f"{self._place.path}/")
        if entry.lfs is not None:
            digest = Digest(DigestKind.SHA256, entry.lfs.sha256)
        else:
            digest = Digest(DigestKind.GIT_BLOB, entry.blob_id)
        return RemoteFile(path=path, size=entry.size, version=digest.hexadecimal, address=entry.path, digest=digest)

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a file from `offset` on. Raises TransientError, TrainerError."""
        url = hf_hub_url(
            self._place.repository, file.address, repo_type=self._kind, revision=self._revision, endpoint=self._api.endpoint
        )
        headers = build_hf_headers(token=self._token or False) | {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                if response.status_code >= httpx2.codes.BAD_REQUEST:
                    raise self._failure(response)
                # A server may send the whole file although only its end was requested. The beginning is then skipped.
                skip = offset if response.status_code == httpx2.codes.OK else 0
                for chunk in response.iter_bytes():
                    if skip < len(chunk):
                        yield memoryview(chunk)[skip:]
                    skip = max(skip - len(chunk), 0)
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise untrusted_certificate(error) or TransientError(f"the connection failed ({type(error).__name__})") from None

    def _failure(self, response: httpx2.Response) -> Exception:
        status = response.status_code
        transient = transient_failure(response, self._api.endpoint)
        if transient is not None:
            return transient
        if status in DENIED:
            return self._refusal(f"{self._shown}: access is refused (HTTP status {status})", self._access_hint())
        if status in ABSENT:
            return self._refusal(
                f"{self._shown} does not exist (HTTP status {status})",
                f"correct the name or the revision; the Hub hides private repositories, so otherwise {self._access_hint()}",
            )
        return SourceUnavailableError(f"{self._shown}: HTTP status {status}", "try again later")

    def _access_hint(self) -> str:
        hint = (
            "the token of spec.fetch.hubTokenSecretRef (on your own machine: HF_TOKEN) may not read it: "
            "check its rights, its expiry, and that the terms of a gated repository are accepted"
        )
        if self._token is None:
            hint = (
                "name a Secret with an access token in spec.fetch.hubTokenSecretRef (on your own machine: set HF_TOKEN), "
                "and accept the terms of a gated repository"
            )
        if self._refusal is DataError and not self._place.is_dataset:
            return f"write hf://{HUB_DATASETS}{self._place.repository} where it is a data set; otherwise {hint}"
        return hint
