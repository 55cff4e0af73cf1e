"""The chart with Helm 3, of which many clusters are served; everything else here runs with Helm 4."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import CHART
from tests.integration.test_values_matrix import nested, rows
from tools.cluster.binaries import KUBERNETES_VERSION, ensure_binaries, ensure_programs

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def template(helm: Path, values: Path) -> subprocess.CompletedProcess[str]:
    place = ("--namespace", "matrix-system", "--kube-version", KUBERNETES_VERSION)
    command = [helm, "template", "matrix", CHART, *place, "--values", values]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_renders_the_same_objects_of_any_two_values(tmp_path: Path) -> None:
    values = tmp_path / "values.json"
    for row in [{"crds.enabled": True}, *rows()]:
        values.write_text(json.dumps(nested(row)))
        found: list[list[Any]] = []
        for helm in (ensure_binaries().helm, *ensure_programs("helm3")):
            done = template(helm, values)
            assert done.returncode == 0, done.stderr
            documents = [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]
            found.append(sorted(json.dumps(document, sort_keys=True) for document in documents))
        assert found[0]
        assert found[0] == found[1], row


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("strategy.type", 3, "strategy.type"),
        ("resources.limits", "abc", "resources.limits"),
        ("metrics.nope", 1, "nope"),
        ("metrics.authentication", True, "metrics.tls.secretName"),
    ],
)
def test_it_refuses_wrong_values_by_their_names(place: str, value: object, named: str, tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps(nested({place: value})))
    (helm,) = ensure_programs("helm3")
    done = template(helm, tmp_path / "values.json")
    assert done.returncode != 0
    assert named in done.stderr
