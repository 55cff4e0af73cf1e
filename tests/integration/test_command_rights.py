"""Each command for jobs, on a real API server, with the rights of docs/reference/rights.md, and without each of them."""

from __future__ import annotations

import copy
import hashlib
import shlex
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from finetune_cli.app import app
from finetune_cli.cluster.errors import Right
from finetune_job.api.base import ClaimPath
from finetune_job.plan.digest import canonical_json
from tests.integration.command_rights import COMMANDS, USE
from tests.integration.played_pods import LABEL, played_pods
from tests.integration.test_change_commands import MANIFEST
from tests.integration.test_commands import Caller, caller
from tests.support.builders import a_job
from tests.unit.finetune_cli.jobs import objects
from tools.cluster.errors import wait_until

__all__ = ["caller"]
pytestmark = pytest.mark.integration
TOLD = {
    "list": ("list", "failed "),
    "status JOB": ("status running", "running: Running, train"),
    "status JOB --curve --checkpoints": ("status succeeded --curve --checkpoints", "curve:  █▁  2.4 to 1.2"),
    "wait JOB": ("wait succeeded", "succeeded: Finished"),
    "logs JOB, of pods that exist": ("logs running", "ready"),
    "logs JOB, of pods that are gone": ("logs succeeded", "[rank-00000] loss 1.2"),
    "explain job/JOB": ("explain job/failed", "DeviceOutOfMemory"),
    "cost": ("cost", "vision"),
    "download JOB DIR": ("download succeeded {word}", "1 file,"),
    "submit FILE": ("submit {word}.yaml", "{word}: created"),
    "submit FILE --watch": ("submit {word}.yaml --watch", "{word}: Succeeded"),
    "suspend JOB": ("suspend running", "running: suspended"),
    "resume JOB": ("resume new", "new: resumed"),
    "cancel JOB": ("cancel running", "running: cancelled"),
    "retry JOB, that waits": ("retry stalled", "stalled: trying again"),
    "retry JOB, that has ended": ("retry failed", "failed-2: created"),
    "fork JOB": ("fork succeeded", "name: succeeded-2"),
    "reproduce JOB": ("reproduce succeeded", "succeeded-reproduced: created"),
}
"""Of each command a line, and what its answer has with the least rights. {word} is another one each time."""


@pytest.fixture
def workspace(caller: Caller) -> Path:
    """The claims of the job `succeeded`, with its frozen plan and its results; the pod of `running` has run."""
    kube, namespace, claims = caller.workload.kube, caller.workload.namespace, caller.directory / "claims"
    plan = a_job().plan().model_copy(update={"output": ClaimPath(claim="results", path="succeeded")})
    kube.create("ConfigMap", namespace, {"metadata": {"name": "succeeded-plan"}, "data": {"plan.json": canonical_json(plan)}})
    folder, results = claims / plan.workspace.claim / plan.workspace.path, claims / "results/succeeded"
    for path, text in {
        folder / "logs/train-0/rank-00000.log": "loss 1.2\n",
        folder / "history.jsonl": '{"step": 1, "loss": 2.4}\n{"step": 60, "loss": 1.2}\n',
        folder / "checkpoints/step-0000000060/manifest.json": "{}",
        results / "adapter/manifest.json": '{"files": {"adapter_model.safetensors": {"size": 1, "sha256": "a1"}}}\n',
        results / "merged/manifest.json": '{"files": []}\n',
        results / "README.md": "# card\n",
        results / "SHA256SUMS": f"{hashlib.sha256(b'# card' + bytes([10])).hexdigest()}  README.md\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    artifacts = [
        {"name": name, "path": "", "sha256": hashlib.sha256((results / name / "manifest.json").read_bytes()).hexdigest()}
        for name in ("adapter", "merged")
    ]
    kube.patch("FineTuneJob", namespace, "succeeded", {"status": {"artifacts": artifacts}}, "status")
    kube.patch("FineTuneJob", namespace, "new", {"spec": {"run": {"suspend": True}}})
    state = {"running": {"startedAt": "2026-03-01T10:00:00Z"}}
    ran = {"name": "trainer", "image": "", "imageID": "", "ready": True, "restartCount": 0, "state": state}
    kube.patch("Pod", namespace, "running-train-1-0", {"status": {"containerStatuses": [ran]}}, "status")
    return claims


def test_each_command_works_with_its_rights_and_names_each_that_is_missing(
    caller: Caller, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube, namespace, directory = caller.workload.kube, caller.workload.namespace, caller.directory
    assert set(TOLD) == {each.command for each in COMMANDS}
    sets = {each.needed for each in COMMANDS}
    sets |= {tuple(one for one in each if one is not left_out) for each in sets for left_out in each}
    kubeconfigs = caller.users(sorted(sets, key=str))
    monkeypatch.chdir(directory)
    words = iter(f"word-{number}" for number in range(1000))

    def call(rights: tuple[Right, ...], line: str) -> Result:
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfigs[rights]))
        return CliRunner().invoke(app, shlex.split(line))

    def filled(text: str, word: str) -> str:
        return text.replace("{word}", word)

    answers: dict[str, object] = {}
    with played_pods(kube, namespace, workspace, monkeypatch, {"running-train-1-0": "ready"}):
        for each in COMMANDS:
            line, _ = TOLD[each.command]
            for left_out in each.needed:
                word = next(words)
                (directory / f"{word}.yaml").write_text(MANIFEST.replace("submitted", word))
                done = call(tuple(one for one in each.needed if one is not left_out), filled(line, word))
                said = " ".join(done.output.split())
                named = f"you may not {Right(left_out.verb, left_out.resource, left_out.group, namespace)}"
                if left_out is USE:
                    named = "you may not use the claim"
                elif left_out.resource == "pods/exec":
                    named = f"you may not get and create pods/exec in the namespace {namespace}"
                if done.exit_code != 3 or named not in said:
                    answers[f"{each.command} without {left_out}"] = (done.exit_code, said[-300:])
        for pod in kube.list("Pod", namespace, LABEL):  # of those who may not delete it
            kube.delete("Pod", namespace, pod["metadata"]["name"])
        for each in COMMANDS:
            line, told = TOLD[each.command]
            word = next(words)
            (directory / f"{word}.yaml").write_text(MANIFEST.replace("submitted", word))
            ending = threading.Thread(target=end_job, args=(caller, word))
            if "--watch" in line:
                ending.start()
            done = call(each.needed, filled(line, word))
            if done.exit_code != 0 or filled(told, word) not in done.output:
                answers[each.command] = (done.exit_code, done.output[-500:])
    assert answers == {}, "\n".join(f"{name}: {said}" for name, said in answers.items())
    assert kube.list("Pod", namespace, LABEL) == [], "every pod that reads is deleted"


def end_job(caller: Caller, name: str) -> None:
    """As an operator would, once it is there."""
    kube, namespace = caller.workload.kube, caller.workload.namespace
    wait_until(lambda: kube.get("FineTuneJob", namespace, name), f"the job {name}", 60)
    kube.patch("FineTuneJob", namespace, name, {"status": copy.deepcopy(objects.SUCCEEDED["status"])}, "status")
