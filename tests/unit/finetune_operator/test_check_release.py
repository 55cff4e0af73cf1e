"""What `helm test` says of metrics; what it asks the API server is tested on a real one, in tests/integration/test_chart.py."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from finetune_operator.check_release import MetricsAddress, job_with, main, read_metrics


@contextmanager
def serving(content: bytes, status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            # In two parts, as long answers come.
            half = len(content) // 2
            for part in (content[:half], content[half:]):
                self.wfile.write(part)
                self.wfile.flush()
                time.sleep(0.1)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("content", "status", "problem"),
    [
        (b"# TYPE passes counter\npasses_total 3\n", 200, ""),
        (b"", 200, "has no metrics"),
        (b"<html>\n", 200, "not in Prometheus' format"),
        (b"\xff", 200, "is the operator running"),
        (b"passes_total 3\n", 503, "answers with status 503"),
    ],
)
def test_metrics_are_parsed(content: bytes, status: int, problem: str) -> None:
    with serving(content, status) as address:
        found = asyncio.run(read_metrics(MetricsAddress(address)))
    assert (problem in found) if problem else found == ""


def test_an_operator_that_does_not_answer_is_named() -> None:
    with serving(b"", 200) as address:
        pass
    assert "does networkPolicy.metricsFrom let this pod in?" in asyncio.run(read_metrics(MetricsAddress(address)))


def test_a_job_differs_in_one_field() -> None:
    assert job_with("training.globalBatchSize", 0)["spec"]["training"] == {"epochs": 1, "globalBatchSize": 0}
    assert job_with("workspace.claimName", "x")["spec"]["training"] == {"epochs": 1, "globalBatchSize": 16}


def test_without_an_api_server_the_test_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["--namespace=default"]) == 1
    assert "failed: the API server cannot be reached" in capsys.readouterr().out
