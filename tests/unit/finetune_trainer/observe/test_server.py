"""What rank 0 answers over HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from finetune_job.progress import Progress
from finetune_trainer.observe.server import RunMetrics, serving
from tests.unit.finetune_trainer.observe.test_metrics import FULL


class Switch:
    is_on = False

    def __call__(self) -> bool:
        return self.is_on


@pytest.fixture
def served() -> Iterator[tuple[str, Switch]]:
    switch = Switch()
    with serving(RunMetrics(FULL, switch), 0) as port:
        yield f"http://127.0.0.1:{port}", switch


def answer(url: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, response.headers["Content-Type"], response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def test_answers_over_http(served: tuple[str, Switch]) -> None:
    address, switch = served
    status, kind, body = answer(f"{address}/progress")
    assert (status, kind, Progress.model_validate(json.loads(body))) == (200, "application/json", FULL)
    status, kind, body = answer(f"{address}/metrics")
    assert (status, kind.startswith("text/plain; version=")) == (200, True)
    assert b"finetune_training_goodput_ratio 0.25" in body
    assert answer(f"{address}/healthz")[0] == 200
    switch.is_on = True
    assert answer(f"{address}/healthz")[0] == 503
    assert answer(f"{address}/other")[0] == 404
