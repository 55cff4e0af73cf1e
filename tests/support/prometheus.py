"""A real Prometheus and promtool, with the rules that the chart renders."""

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.installed_chart import CHART, SYSTEM
from tools.cluster.binaries import ensure_binaries
from tools.cluster.errors import wait_until
from tools.cluster.processes import run_command, start_component

Document = dict[str, Any]
START_SECONDS = 60.0


@cache
def rendered(*settings: str, release: str = "tuning") -> list[Document]:
    """Return the chart's objects from `helm template` with these values, without a cluster."""
    arguments = [part for setting in settings for part in ("--set", setting)]
    text = run_command(ensure_binaries().helm, "template", release, CHART, "--namespace", SYSTEM, *arguments)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def rendered_rules(*settings: str) -> Document:
    """The spec of the PrometheusRule."""
    found = rendered("metrics.prometheusRule.create=true", *settings)
    (rule,) = [document for document in found if document["kind"] == "PrometheusRule"]
    spec: Document = rule["spec"]
    return spec


class Prometheus:
    """A running one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def query(self, expression: str, at: float | None = None) -> list[Document]:
        """Samples of an instant query. `at`: seconds since 1970; None: now."""
        time = {} if at is None else {"time": str(at)}
        found: list[Document] = self._get("query", query=expression, **time)["data"]["result"]
        return found

    def are_targets_up(self, number: int) -> bool:
        """Whether there are this many targets or more, and each has been scraped."""
        targets = self._get("targets")["data"]["activeTargets"]
        return len(targets) >= number and all(target["health"] == "up" for target in targets)

    def _get(self, path: str, **parameters: str) -> Document:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            found: Document = json.load(answer)
        return found


@contextmanager
def running_prometheus(
    directory: Path, port: int, scrape_configs: list[Document], rules: Document, past: str = ""
) -> Iterator[Prometheus]:
    """Scrapes and evaluates each second. `past`: what it has scraped before, as OpenMetrics text with times."""
    directory.mkdir()
    if past:
        (directory / "past").write_text(past)
        # One block, for each takes another reading of the whole text.
        blocks = ("create-blocks-from", "--max-block-duration=30d", "openmetrics", "--quiet")
        run_command(ensure_binaries().promtool, "tsdb", *blocks, directory / "past", directory / "data")
    (directory / "rules.json").write_text(json.dumps(rules))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.json"],
        "scrape_configs": scrape_configs,
    }
    (directory / "prometheus.yaml").write_text(json.dumps(config))
    command: list[str | Path] = [
        ensure_binaries().prometheus,
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = start_component("prometheus", command, directory / "prometheus.log")
    prometheus = Prometheus(f"http://127.0.0.1:{port}")

    def answers() -> bool:
        process.check_running()
        try:
            return prometheus.are_targets_up(1 if scrape_configs else 0)
        except OSError:
            return False

    try:
        wait_until(answers, f"prometheus, see {process.log}", START_SECONDS)
        yield prometheus
    finally:
        process.kill()
