"""The four core cases and bad input on a real cluster: refused with field, value, reason and fix, and no GPU pod."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_job.names import Role
from tools.cluster.errors import ClusterError
from tools.stack import CLAIMS, NAMESPACE, RELEASE, ROOT, SYSTEM_NAMESPACE, Stack, condition_of
from tools.volumes import bound_claim, volume

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
REFUSED = sorted((ROOT / "examples/refused").glob("*.yaml"))


def verdicts(path: Path) -> dict[str, str]:
    """The `# key: value` lines at the top of an example."""
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# ")]
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def refused_by(gate: str) -> list[Path]:
    return [path for path in REFUSED if (verdicts(path)["verdict"], verdicts(path).get("gate")) == ("refused", gate)]


def apply(stack: Stack, path: Path) -> str:
    return stack.apply_example(str(path.relative_to(ROOT)), name=f"refused-{path.stem}"[:50])


def assert_refused(stack: Stack, name: str, path: Path) -> dict[str, Any]:
    job = stack.wait_for_condition(name, "Stalled", "Finished")
    assert condition_of(job, "Stalled").get("status") == "True", job["status"]
    errors = [finding for finding in job["status"]["findings"] if finding["severity"] == "error"]
    assert verdicts(path)["finding"] in {finding["rule"] for finding in errors}
    for finding in errors:
        assert finding["field"].startswith("spec."), finding
        assert finding["message"], finding
        assert finding["fix"], finding
    assert stack.batch_jobs(name, Role.TRAIN) == []
    return job


def test_the_charts_own_test_passes(stack: Stack) -> None:
    said = stack.cluster.helm("test", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--logs")
    # Helm shows the log once for each object of the test.
    lines = {line for line in said.splitlines() if line.startswith(("passed:", "failed:"))}
    assert [line.partition(":")[0] for line in lines] == ["passed"] * 4


@pytest.mark.nightly
def test_the_charts_own_test_runs_a_job_to_its_end(stack: Stack) -> None:
    """The optional one, on CPU cores, in the namespace of the release."""
    for name in CLAIMS:
        stack.apply(volume(SYSTEM_NAMESPACE, name, stack.claim(name), storage_class=""), bound_claim(SYSTEM_NAMESPACE, name))
    spec = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())["spec"]
    release = (RELEASE, ROOT / "charts/finetune-operator", "--namespace", SYSTEM_NAMESPACE)
    stack.cluster.helm("upgrade", *release, "--reuse-values", "--wait", "--set-json", f"test.job={json.dumps(spec)}")
    try:
        said = stack.cluster.helm("test", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--logs", "--timeout", "15m")
        assert "passed: the FineTuneJob of the values succeeds" in said
        assert "failed:" not in said
        assert json.loads((stack.claim("models-out") / "quickstart/verification.json").read_text())["passed"] is True
        assert stack.objects("finetunejobs", namespace=SYSTEM_NAMESPACE) == []
    finally:
        stack.cluster.helm("rollback", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--wait")


def test_there_are_manifests_for_both_gates() -> None:
    assert len(refused_by("rules")) >= 6
    assert refused_by("preflight")


def test_what_the_manifest_shows_is_refused_without_any_pod(stack: Stack) -> None:
    names: dict[str, Path] = {}
    at_the_door: dict[Path, str] = {}
    for path in refused_by("rules"):
        try:
            names[apply(stack, path)] = path
        except ClusterError as refusal:
            at_the_door[path] = str(refusal)
    assert names
    assert at_the_door
    # What the object alone shows, the API server refuses, under the same id.
    for path, said in at_the_door.items():
        assert f"{verdicts(path)['finding']}: " in said
    for name, path in names.items():
        assert_refused(stack, name, path)
        assert stack.batch_jobs(name) == []


def test_what_only_the_model_shows_is_refused_by_preflight(stack: Stack) -> None:
    path = refused_by("preflight")[0]
    name = apply(stack, path)
    job = assert_refused(stack, name, path)
    assert condition_of(job, "Prepared")["reason"] == "PreflightRefused"
    assert [one["metadata"]["name"] for one in stack.batch_jobs(name)] == [f"{name}-preflight-0"]


def test_unknown_fields_are_an_error_of_kubectl(stack: Stack) -> None:
    document = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    document["metadata"] |= {"name": "unknown-field", "namespace": NAMESPACE}
    document["spec"]["trainig"] = {"epochs": 1}
    with pytest.raises(ClusterError, match="trainig"):
        stack.apply(document)
