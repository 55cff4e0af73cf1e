"""What the hub's double does when it is written to: repositories made, large files stored, commits that show all of it at
once."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

if TYPE_CHECKING:
    from tests.support.hub import Hub

LARGE_BYTES = 512
"""Files of this size and above lie in large file storage."""
SIGNATURE = "not-for-any-log"
"""Stands in every signed address."""
MAIN = "main"
FIRST_FILES = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
"""Files that the hub creates in a new repository."""


@dataclass(frozen=True)
class Answer:
    """An answer of the hub."""

    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)


def commit_of(files: dict[str, bytes]) -> str:
    """A commit id for these files."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + hashlib.sha256(files[path]).digest())
    return digest.hexdigest()


def git_blob(content: bytes) -> str:
    """Name of the content in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Repository:
    """One repository at its newest commit."""

    files: dict[str, bytes]
    commit: str
    token: str | None = None
    """Needed to see it."""
    announced_commit: str | None = None
    """The commit that the hub names; None: the true one."""
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by commit."""
    is_private: bool = False


def _json(status: int, value: object) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


class Writes:
    """Large files that are stored, visible or not, and the tokens that may write."""

    def __init__(self) -> None:
        self.tokens: set[str] | None = None
        """Tokens that may write; None: everybody."""
        self.part_bytes: int | None = None
        """Larger files are sent in parts of this size; None: none is."""
        self.stored: dict[str, bytes] = {}
        """Contents by SHA-256."""
        self.received: list[int] = []
        """Sizes of what was sent to the store."""
        self.ignored: set[str] = set()
        """Names that the repository's .gitignore leaves out."""
        self.storage_refusal: str | None = None
        """The message with which the storage refuses files."""
        self._parts: dict[str, dict[int, bytes]] = {}
        self._lock = threading.RLock()

    def answer(self, hub: Hub, method: str, path: str, headers: Message, body: bytes, *, store: bool) -> Answer | None:
        """The answer to a request that writes; None: it is none of those."""
        address = urlsplit(path)
        name = unquote(address.path)
        with self._lock:
            if store:
                if method != "PUT" or parse_qs(address.query).get("Signature") != [SIGNATURE]:
                    return None
                return self._put(name, body)
            if method != "POST":
                return None
            if name.startswith("/complete/"):
                return self._complete(name.removeprefix("/complete/"), json.loads(body))
            for pattern, does in (
                (r"/api/repos/create", self._create),
                (r"/api/validate-yaml", self._validate),
                (r"/api/models/([^/]+/[^/]+)/preupload/main", self._preupload),
                (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
                (r"/([^/]+/[^/]+)\.git/info/lfs/verify", self._verify),
                (r"/api/models/([^/]+/[^/]+)/commit/main", self._commit),
            ):
                match = re.fullmatch(pattern, name)
                if match:
                    token = headers.get("Authorization", "").removeprefix("Bearer ")
                    if self.tokens is not None and token not in self.tokens:
                        status = 403 if token else 401
                        return Answer(status, headers={"X-Error-Message": f"no write access, see {hub.address}/settings"})
                    return does(hub, *match.groups(), body)
        return None

    def _create(self, hub: Hub, body: bytes) -> Answer:
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}"
        where = {"url": f"{hub.address}/{name}"}
        if ("models", name) in hub.repositories:
            return _json(409, {**where, "error": "You already created this model repo"})
        made = Repository(dict(FIRST_FILES), commit_of(FIRST_FILES), is_private=wanted.get("visibility") == "private")
        hub.repositories["models", name] = made
        return _json(200, where)

    def _validate(self, _hub: Hub, body: bytes) -> Answer:
        content = json.loads(body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        try:
            parsed = yaml.safe_load(match[1]) if match else {}
        except yaml.YAMLError:
            parsed = None
        if not isinstance(parsed, dict):
            return _json(400, {"errors": [{"message": "the front matter is no YAML mapping"}], "warnings": []})
        return _json(200, {"errors": [], "warnings": []})

    def _preupload(self, hub: Hub, name: str, body: bytes) -> Answer:
        repository = _repository(hub, name)
        if repository is None:
            return Answer(404, headers={"X-Error-Code": "RepoNotFound"})
        files = []
        for file in json.loads(body)["files"]:
            is_large = file["size"] >= LARGE_BYTES
            content = repository.files.get(file["path"])
            entry: dict[str, Any] = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular"}
            entry["shouldIgnore"] = file["path"] in self.ignored
            if content is not None:
                entry["oid"] = hashlib.sha256(content).hexdigest() if len(content) >= LARGE_BYTES else git_blob(content)
            files.append(entry)
        return _json(200, {"files": files})

    def _batch(self, hub: Hub, name: str, body: bytes) -> Answer:
        objects = []
        for wanted in json.loads(body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if self.storage_refusal is not None:
                entry["error"] = {"code": 422, "message": self.storage_refusal}
            elif oid not in self.stored:
                upload: dict[str, Any] = {"href": f"{hub.store_address}/upload/{oid}?Signature={SIGNATURE}"}
                if self.part_bytes is not None and size > self.part_bytes:
                    count = -(-size // self.part_bytes)
                    upload["href"] = f"{hub.address}/complete/{oid}"
                    upload["header"] = {"chunk_size": str(self.part_bytes)} | {
                        f"{number:05d}": f"{hub.store_address}/part/{oid}/{number}?Signature={SIGNATURE}"
                        for number in range(1, count + 1)
                    }
                entry["actions"] = {"upload": upload, "verify": {"href": f"{hub.address}/{name}.git/info/lfs/verify"}}
            objects.append(entry)
        return _json(200, {"transfer": "basic", "objects": objects})

    def _put(self, name: str, body: bytes) -> Answer:
        self.received.append(len(body))
        _, kind, oid, *number = name.split("/")
        if kind == "part":
            self._parts.setdefault(oid, {})[int(number[0])] = body
            return Answer(200, b"", {"ETag": f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'})
        return self._keep(oid, body)

    def _complete(self, oid: str, said: dict[str, Any]) -> Answer:
        parts = self._parts.pop(oid, {})
        if [part["partNumber"] for part in said["parts"]] != sorted(parts):
            return Answer(400)
        return self._keep(oid, b"".join(parts[number] for number in sorted(parts)))

    def _keep(self, oid: str, content: bytes) -> Answer:
        if hashlib.sha256(content).hexdigest() != oid:
            return Answer(422, headers={"X-Error-Message": "the content is not of that digest"})
        self.stored[oid] = content
        return Answer(200)

    def _verify(self, _hub: Hub, _name: str, body: bytes) -> Answer:
        said = json.loads(body)
        return Answer(200 if len(self.stored.get(said["oid"], b"")) == said["size"] else 404)

    def _commit(self, hub: Hub, name: str, body: bytes) -> Answer:
        repository = _repository(hub, name)
        if repository is None:
            return Answer(404, headers={"X-Error-Code": "RepoNotFound"})
        files = dict(repository.files)
        for line in body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                if value.get("parentCommit", repository.commit) != repository.commit:
                    return Answer(412, headers={"X-Error-Message": "A commit has happened since. Please refresh and try again."})
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.stored:
                    return Answer(400, headers={"X-Error-Message": "the large file is not there"})
                files[value["path"]] = self.stored[value["oid"]]
            elif item["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                return Answer(404, headers={"X-Error-Code": "EntryNotFound"})
        commit = self.commit(repository, files)
        return _json(200, {"commitUrl": f"{hub.address}/{name}/commit/{commit}", "commitOid": commit})

    def commit(self, repository: Repository, files: dict[str, bytes]) -> str:
        """Make these the repository's files; the new commit's id."""
        with self._lock:
            history = f"{repository.commit}/{commit_of(files)}"
            repository.older[repository.commit] = repository.files
            commit = hashlib.sha1(history.encode(), usedforsecurity=False).hexdigest()
            repository.files, repository.commit = files, commit
            return commit


def _repository(hub: Hub, name: str) -> Repository | None:
    return hub.repositories.get(("models", name))
