"""The commands that change jobs, against a real API server, each with the least rights that docs/reference/rights.md names."""

import json
from pathlib import Path

import pytest
import yaml

from tests.integration.command_rights import CREATE, JOB, PATCH, USE
from tests.integration.kube import Document
from tests.integration.test_commands import Caller, caller, rights_of

__all__ = ["caller"]
pytestmark = pytest.mark.integration
MANIFEST = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: submitted}
spec:
  model: {source: "pvc://models/base"}
  data: {source: "pvc://data/train.jsonl"}
  training: {maxSteps: 4, globalBatchSize: 4}
  output: {destination: "pvc://results/submitted"}
  workspace: {claimName: workspace}
"""
PROFILE = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneProfile
metadata: {name: x}
spec: {trainerImage: t}
"""


def found(caller: Caller, name: str) -> Document:
    job = caller.workload.kube.get("FineTuneJob", caller.workload.namespace, name)
    assert job is not None
    return job


def run_of(caller: Caller, name: str) -> Document:
    return {key: found(caller, name)["spec"]["run"][key] for key in ("suspend", "cancel", "retry")}


def test_a_manifest_is_judged_and_created_and_a_conflict_is_told(caller: Caller, tmp_path: Path) -> None:
    namespace = caller.workload.namespace
    call = caller.with_rights(rights_of("submit FILE").needed)
    (tmp_path / "job.yaml").write_text(MANIFEST)
    done = call("submit job.yaml")
    assert (done.returncode, done.stdout) == (0, f"{namespace}/submitted: created\n"), done.stderr
    assert "FineTuneJob submitted: accepted" in done.stderr
    assert found(caller, "submitted")["spec"]["training"]["maxSteps"] == 4
    # Without the right to look at it the conflict alone is told, with it also what is there.
    done = call("submit job.yaml")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        3, f"{namespace}/submitted exists already; give the manifest another name"
    )  # fmt: skip
    looking = caller.with_rights((*rights_of("submit FILE").needed, JOB))
    done = looking("submit job.yaml")
    assert done.returncode == 3
    assert f"exists already (Pending), with the same spec; `finetune status submitted -n {namespace}`" in done.stderr
    (tmp_path / "other.yaml").write_text(MANIFEST.replace("maxSteps: 4", "maxSteps: 5"))
    assert "with another spec; give the manifest another name" in looking("submit other.yaml").stderr
    unused = caller.with_rights((CREATE,))
    (tmp_path / "third.yaml").write_text(MANIFEST.replace("submitted}", "third}"))
    done = unused("submit third.yaml")
    assert done.returncode == 3
    assert done.stderr.startswith("spec.workspace.claimName: you may not use the claim workspace of this namespace; name another")
    (tmp_path / "bad.yaml").write_text(MANIFEST.replace("submitted}", "bad}").replace("maxSteps: 4", "maxStep: 4"))
    done = call("submit bad.yaml -o json")
    assert (done.returncode, json.loads(done.stdout)["accepted"]) == (2, False)
    assert caller.workload.kube.get("FineTuneJob", namespace, "bad") is None
    (tmp_path / "none.yaml").write_text(PROFILE)
    done = call("submit none.yaml")
    assert (done.returncode, "holds no FineTuneJob" in done.stderr) == (2, True)


def test_a_job_is_suspended_resumed_and_cancelled(caller: Caller) -> None:
    namespace = caller.workload.namespace
    for command in ("suspend JOB", "resume JOB", "cancel JOB"):
        assert rights_of(command).needed == (JOB, PATCH)
    call = caller.with_rights((JOB, PATCH))
    done = call("suspend running")
    assert (done.returncode, done.stdout.partition(";")[0]) == (
        0,
        f"{namespace}/running: suspended: its pods end, its checkpoint stays",
    )
    assert run_of(caller, "running") == {"suspend": True, "cancel": False, "retry": 0}
    again = json.loads(call("suspend running -o json").stdout)
    assert (again["changed"], again["message"], again["run"]["suspend"]) == (False, "suspended already", True)
    assert call("resume running").stdout == f"{namespace}/running: resumed: it continues from its latest checkpoint\n"
    assert run_of(caller, "running")["suspend"] is False
    assert call("resume running").stdout == f"{namespace}/running: not suspended\n"
    assert "cancelled: its pods end" in call("cancel running").stdout
    assert run_of(caller, "running")["cancel"] is True


def test_a_waiting_job_is_tried_again_and_an_ended_one_as_another_job(caller: Caller) -> None:
    namespace = caller.workload.namespace
    call = caller.with_rights(rights_of("retry JOB, that waits").needed)
    for number in (1, 2):
        assert call("retry stalled").stdout == f"{namespace}/stalled: trying again (spec.run.retry: {number})\n"
        assert run_of(caller, "stalled")["retry"] == number
    assert "leave --name out" in call("retry stalled --name other").stderr
    ended = caller.with_rights(rights_of("retry JOB, that has ended").needed)
    assert rights_of("retry JOB, that has ended").needed == (JOB, CREATE, USE)
    assert ended("retry failed").stdout == (
        f"{namespace}/failed-2: created with the spec of failed; it begins with the base model\n"
    )
    first, second = found(caller, "failed"), found(caller, "failed-2")
    assert second["spec"] == first["spec"]
    assert second["metadata"]["labels"] == first["metadata"]["labels"]
    assert "status" not in second
    # Its name is taken now, which only who may list jobs can know.
    assert ended("retry failed").returncode == 3
    assert ended("retry failed --name third").returncode == 0


def test_a_fork_is_a_manifest_that_can_be_submitted(caller: Caller, tmp_path: Path) -> None:
    namespace = caller.workload.namespace
    assert rights_of("fork JOB").needed == (JOB,)
    call = caller.with_rights((JOB, CREATE, USE))
    done = call("fork succeeded --set training.learningRate=1e-5 --set spec.training.seed=7 --set metadata.labels.tier=test")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"# From the FineTuneJob {namespace}/succeeded. It begins with the base model")
    before, made = found(caller, "succeeded"), yaml.safe_load(done.stdout)
    assert (made["metadata"]["name"], made["metadata"]["labels"]["tier"]) == ("succeeded-2", "test")
    assert (made["spec"]["training"]["learningRate"], made["spec"]["training"]["seed"]) == ("1e-5", 7)
    assert made["spec"]["output"]["destination"] != before["spec"]["output"]["destination"]
    assert made["spec"]["data"] == before["spec"]["data"]
    (tmp_path / "fork.yaml").write_text(done.stdout)
    submitted = call("submit fork.yaml")
    assert (submitted.returncode, submitted.stdout) == (0, f"{namespace}/succeeded-2: created\n"), submitted.stderr
    done = call("fork succeeded --set training.learnRate=1")
    assert (done.returncode, "has no field spec.training.learnRate" in done.stderr) == (2, True)
    done = call("fork succeeded --set training.globalBatchSize=0")
    assert (done.returncode, "spec.training.globalBatchSize" in done.stderr) == (2, True)
