"""An API server in memory for the command line's tests, and what a kubelet does with a pod that reads a workspace.

Objects are kept by path. A pod that is created runs its container's command here, with `workspace` in place of the claim, and
what it prints becomes its log. `denied` holds the (verb, resource) pairs that are forbidden, as in `("list", "pods")`.
"""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Document = dict[str, Any]
JOBS = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs"
PODS = "/api/v1/namespaces/team/pods"
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


def _merged(document: Document, patch: Document) -> Document:
    """A JSON merge patch that removes nothing."""
    inner = {key: _merged(document.get(key) or {}, value) if isinstance(value, dict) else value for key, value in patch.items()}
    return document | inner


@dataclass
class ApiServer:
    """What the server holds and does."""

    objects: dict[str, Document] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    """By the path of the pod."""
    denied: set[tuple[str, str]] = field(default_factory=set)
    fails: dict[str, int] = field(default_factory=dict)
    """Path -> how many of the next requests are answered 503."""
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    workspace: Path = Path()
    runs_pods: bool = True
    """Whether created pods run; if not, they fail."""

    def put(self, collection: str, *documents: Document) -> None:
        for document in documents:
            self.objects[f"{collection}/{document['metadata']['name']}"] = document

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, str]:
        parts = urlsplit(target)
        path, query = unquote(parts.path), parse_qs(parts.query)
        self.asked.append(f"{method} {target}")
        if self.fails.get(path, 0) > 0:
            self.fails[path] -= 1
            return self._status(503, "ServiceUnavailable", "starting")
        place = path.split("/namespaces/")[-1].split("/")[1:] if "/namespaces/" in path else path.split("/")[4:]
        if not place:
            place = path.rsplit("/", 1)[1:]
        plural, name = place[0], place[1] if len(place) > 1 else ""
        resource = f"{plural}/{place[2]}" if len(place) > 2 else plural
        verb = _VERBS.get(method, "get" if name else "list")
        if (verb, resource) in self.denied:
            return self._status(403, "Forbidden", f'User "me" cannot {verb} resource "{resource}"')
        if resource.endswith("/log"):
            log = self.logs.get(path.removesuffix("/log"), "")
            lines = log.splitlines(keepends=True)
            return 200, "".join(lines[-int(query["tailLines"][0]) :] if "tailLines" in query else lines)
        if method == "POST":
            document = json.loads(body)
            name = document["metadata"]["name"]
            if f"{path}/{name}" in self.objects:
                return self._status(409, "AlreadyExists", f'{plural} "{name}" already exists', name=name)
            if plural == "pods":
                self._create(f"{path}/{name}", document)
            else:
                document["metadata"] |= {"namespace": path.split("/")[-2], "uid": f"uid of {path}/{name}"}
                self.put(path, document)
            return 201, json.dumps(document)
        if not name:
            wanted = dict(one.split("=") for one in query.get("labelSelector", [""])[0].split(",") if "=" in one)
            items = [
                document
                for at, document in self.objects.items()
                if self._is_in(at, path) and wanted.items() <= document["metadata"].get("labels", {}).items()
            ]
            return 200, json.dumps({"items": items, "metadata": {}})
        if path not in self.objects:
            return self._status(404, "NotFound", f'{plural} "{name}" not found', name=name)
        if method == "PATCH":
            self.objects[path] = _merged(self.objects[path], json.loads(body))
        found = self.objects.pop(path) if method == "DELETE" else self.objects[path]
        return 200, json.dumps(found)

    @staticmethod
    def _is_in(at: str, collection: str) -> bool:
        parent = at.rsplit("/", 1)[0]
        if "/namespaces/" in parent and "/namespaces/" not in collection:
            root, _, rest = parent.partition("/namespaces/")
            parent = f"{root}/{rest.split('/')[1]}"
        return parent == collection

    def _create(self, path: str, document: Document) -> None:
        self.objects[path] = document
        (container,) = document["spec"]["containers"]
        if not self.runs_pods:
            ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such claim"}}
            document["status"] = {"phase": "Failed", "containerStatuses": [{"name": container["name"], "state": ended}]}
            return
        program, *arguments = container["command"]
        assert program == "python"
        mount = container["volumeMounts"][0]["mountPath"]
        arguments = [each.replace(mount, str(self.workspace)) for each in arguments]
        done = subprocess.run([sys.executable, "-I", *arguments], capture_output=True, text=True, timeout=60, check=True)
        self.logs[path] = done.stdout
        document["status"] = {"phase": "Succeeded"}

    @staticmethod
    def _status(code: int, reason: str, message: str, **details: str) -> tuple[int, str]:
        return code, json.dumps({"kind": "Status", "code": code, "reason": reason, "message": message, "details": details})


@contextmanager
def served(server: ApiServer, kubeconfig: Path) -> Iterator[None]:
    """Serve it on a port of this machine, and write the kubeconfig that leads there."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, text = server.answer(self.command, self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 - names that http.server asks for

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        context = {"cluster": "here", "user": "me", "namespace": "team"}
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": context}],
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{listening.server_port}"}}],
            "users": [{"name": "me", "user": {"token": "secret"}}],
        }
        kubeconfig.write_text(json.dumps(config))
        yield
        listening.shutdown()
