"""Parts of the Kubernetes client that are loaded late: a login that needs them still works, and so does what imports them."""

from __future__ import annotations

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

PROGRAM = """
import sys
from finetune_cli.cluster.client import ClusterClient
assert "requests" not in sys.modules and "kubernetes.stream" not in sys.modules
print(ClusterClient().request("GET", "/api")["kind"])
from requests_oauthlib import OAuth2Session
from kubernetes.stream import stream
assert isinstance(OAuth2Session, type) and callable(stream)
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Both a provider of identities and an API server."""

    def do_GET(self) -> None:
        if self.path.endswith("openid-configuration"):
            self.answer({"token_endpoint": f"http://{self.headers['Host']}/token"})
        else:
            assert self.headers["Authorization"] == "Bearer fresh"
            self.answer({"kind": "APIVersions"})

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        assert self.path == "/token"
        assert "refresh_token=old-refresh" in asked
        self.answer({"access_token": "unused", "id_token": "fresh", "refresh_token": "new-refresh", "token_type": "bearer"})

    def answer(self, content: dict[str, str]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def expired_token() -> str:
    part = base64.urlsafe_b64encode(json.dumps({"exp": 1}).encode()).decode().rstrip("=")
    return f"{part}.{part}.{part}"


def test_an_expired_login_is_renewed_by_the_libraries_that_are_loaded_then(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        provider = {"idp-issuer-url": address, "client-id": "cli", "client-secret": "s", "id-token": expired_token()}
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": address}}],
            "users": [
                {
                    "name": "me",
                    "user": {"auth-provider": {"name": "oidc", "config": {**provider, "refresh-token": "old-refresh"}}},
                }
            ],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "KUBECONFIG": str(path), "OAUTHLIB_INSECURE_TRANSPORT": "1"},
        )  # fmt: skip
        server.shutdown()
    assert (done.returncode, done.stdout) == (0, "APIVersions\n"), done.stderr
