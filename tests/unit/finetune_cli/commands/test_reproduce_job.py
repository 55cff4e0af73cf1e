"""A job of a cluster that is run again: what is created for it, and what is said of both results."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.reproduction import read_results, reproduction_name, reproduction_of
from finetune_cli.jobs.seen import seen_job
from finetune_job.api.base import ClaimPath
from finetune_job.plan.digest import canonical_json
from tests.support.builders import a_job
from tests.unit.finetune_cli.cluster.api_server import JOBS, ApiServer
from tests.unit.finetune_cli.commands.test_cluster_jobs import (
    CONFIG_MAPS,
    Run,
    after_requests,
    check_golden,
    run,
    server,
    session,
)
from tests.unit.finetune_cli.jobs import objects

__all__ = ["run", "server"]
AGAIN = "succeeded-reproduced"
FILES = {
    "adapter": {"adapter_config.json": "a1", "adapter_model.safetensors": "a2"},
    "merged": {"config.json": "m1", "model.safetensors": "m2", "tokenizer.json": "m3"},
}


def manifests(plan: str, files: dict[str, dict[str, str]]) -> dict[str, str]:
    """As training and the merge write them: the one lists its files by name, the other as a list."""
    adapter = {"plan_sha256": plan, "files": {name: {"size": 1, "sha256": sha256} for name, sha256 in files["adapter"].items()}}
    found = {"adapter": json.dumps(adapter, indent=2) + "\n"}
    if "merged" in files:
        listed = [{"name": name, "num_bytes": 1, "sha256": sha256} for name, sha256 in files["merged"].items()]
        found["merged"] = json.dumps({"plan_sha256": plan, "files": listed}) + "\n"
    return found


Finished = Callable[..., dict[str, Any]]


@pytest.fixture
def finished(server: ApiServer) -> Finished:
    """Gives a job its frozen plan and its results on the claim, and says in its status that it has succeeded."""

    def finish(name: str, files: dict[str, dict[str, str]] = FILES, device: str = "cpu", **plan: str) -> dict[str, Any]:
        frozen = a_job().plan().model_copy(update={"output": ClaimPath(claim="results", path=name)})
        server.put(CONFIG_MAPS, {"metadata": {"name": f"{name}-plan"}, "data": {"plan.json": canonical_json(frozen)}})
        shutil.rmtree(server.workspace / name, ignore_errors=True)
        artifacts = []
        for kind, text in manifests(name, files).items():
            path = server.workspace / name / kind / "manifest.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            artifacts.append({"name": kind, "path": "", "sha256": hashlib.sha256(text.encode()).hexdigest()})
        inner = {"attempts": [{"attempt": 0, "device": device}]}
        statement = {"predicate": {"buildDefinition": {"internalParameters": inner}}}
        (server.workspace / name / "provenance.json").write_text(json.dumps(statement))
        job = copy.deepcopy(server.objects[f"{JOBS}/{name}"])
        seen = {"hash": name, "dataHash": "d" * 64, "modelDigest": "e" * 64, "trainerImage": "trainer:1", **plan}
        job["status"] = {**copy.deepcopy(objects.SUCCEEDED["status"]), "artifacts": artifacts, "plan": seen}
        job["metadata"]["resourceVersion"] = "9"
        server.put(JOBS, job)
        return job

    return finish


def test_what_is_printed(run: Run, server: ApiServer, finished: Finished, tmp_path: Path) -> None:
    cannot = session(
        run,
        [f"reproduce {name}" for name in ("missing", "new", "running", "failed", "succeeded")]
        + ["reproduce succeeded --local --wait"],
    )
    assert f"{JOBS}/{AGAIN}" not in server.objects
    finished("succeeded")
    made = session(run, ["reproduce succeeded --nodes 1", "reproduce succeeded", "reproduce succeeded"])
    finished(AGAIN)
    same = session(run, ["reproduce succeeded", "reproduce succeeded -o json", "reproduce succeeded --nodes 4"])
    finished(AGAIN, {**FILES, "adapter": {**FILES["adapter"], "adapter_model.safetensors": "a0"}}, "NVIDIA H100")
    different = session(run, ["reproduce succeeded"])
    finished(AGAIN, {"adapter": FILES["adapter"]}, trainerImage="trainer:2")
    unmerged = session(run, ["reproduce succeeded"])
    finished(AGAIN, dataHash="0" * 64, modelDigest="0" * 64)
    inputs = session(run, ["reproduce succeeded"])
    check_golden("reproduce.txt", f"{cannot}\n{made}\n{same}\n{different}\n{unmerged}\n{inputs}", tmp_path)
    assert [path for path in server.objects if "reader" in path] == []


def test_the_new_job_has_the_same_spec_and_writes_elsewhere(run: Run, server: ApiServer, finished: Finished) -> None:
    first = finished("succeeded")
    assert run("reproduce succeeded").exit_code == 0
    made = server.objects[f"{JOBS}/{AGAIN}"]
    assert made["metadata"]["annotations"] == {"finetune.dev/reproduces": "uid-1"}
    assert made["metadata"]["labels"] == first["metadata"]["labels"]
    folder = made["spec"].pop("output")
    assert folder["destination"].startswith("pvc://results/succeeded-reproduced-")
    assert folder["sampleAnswers"] == 0
    assert made["spec"] == {key: value for key, value in first["spec"].items() if key != "output"}
    # Neither is a job that somebody else made taken for it, nor one that runs another of the same name again.
    made["metadata"]["annotations"] = {"finetune.dev/reproduces": "uid-0"}
    done = run("reproduce succeeded")
    assert (done.exit_code, "team/succeeded-reproduced exists, and was not made to run" in done.stderr) == (2, True)
    assert run("reproduce succeeded --name other").exit_code == 0
    assert f"{JOBS}/other" in server.objects


@pytest.mark.parametrize("destination", ["hf://org/model", "s3://bucket/a", "oci://registry.test/a:1"])
def test_nothing_is_published(destination: str) -> None:
    document = copy.deepcopy(objects.SUCCEEDED)
    document["spec"]["output"] = {"destination": destination, "adapter": False, "secretRef": {"name": "s", "key": "token"}}
    made = reproduction_of(seen_job(document), "again", None, "again-1")
    assert made["spec"]["output"] == {"destination": "pvc://work/again-1", "adapter": False, "sampleAnswers": 0}
    document["spec"]["workspace"] = {"volumeClaimTemplate": {"storage": "1Gi"}}
    made = reproduction_of(seen_job(document), "again", None, "again-1")
    assert made["spec"]["output"]["destination"] == "pvc://again-workspace/again-1"


def test_another_number_of_nodes_has_as_many_ranks_if_their_number_is_no_part_of_the_result() -> None:
    document = copy.deepcopy(objects.SUCCEEDED)
    with pytest.raises(LocalError, match=r"--nodes 1: team/succeeded adds up gradients in an order that depends on its 2 nodes"):
        reproduction_of(seen_job(document), "again", 1, "again-1")
    assert reproduction_of(seen_job(document), "again", 2, "again-1")["spec"]["parallelism"] == objects.SPEC["parallelism"]
    document["spec"]["training"]["reduction"] = "Ordered"
    document["spec"]["parallelism"]["elastic"] = {"minNodes": 1}
    choices = [
        {"field": "spec.training.activationCheckpointing", "value": '"None"'},
        {"field": "spec.training.microBatchSize", "value": "{"},
        {"field": "spec.parallelism.fsdp.reshardAfterForward", "value": "true"},
    ]
    document["status"]["plan"] = {"hash": "", "choices": choices}
    spec = reproduction_of(seen_job(document), "again", 4, "again-1")["spec"]
    assert spec["parallelism"] == {"nodes": 4, "processesPerNode": 2}
    # What preflight chose by the memory of a rank stays what it was.
    assert spec["training"] == {**document["spec"]["training"], "activationCheckpointing": "None"}
    with pytest.raises(LocalError, match="has 8 ranks, which so many nodes cannot share evenly; give a divisor of 8"):
        reproduction_of(seen_job(document), "again", 3, "again-1")


def test_a_long_name_stays_one() -> None:
    assert reproduction_name("tune") == "tune-reproduced"
    assert reproduction_name("a" * 63) == "a" * 52 + "-reproduced"
    assert reproduction_name(f"{'a' * 51}-{'b' * 11}") == "a" * 51 + "-reproduced"


def test_somebody_who_waits_sees_how_far_it_is_and_what_came_of_it(
    run: Run, server: ApiServer, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished("succeeded")
    trains = {**copy.deepcopy(objects.RUNNING["status"]), "plan": {"hash": "", "dataHash": "d" * 64}}

    def becomes(status: dict[str, Any], version: str) -> None:
        job = server.objects[f"{JOBS}/{AGAIN}"]
        job["metadata"]["resourceVersion"] = version
        job["status"] = status

    assert run("reproduce succeeded").exit_code == 0
    # The two jobs are read, then the new one again and again.
    after_requests(server, monkeypatch, [lambda: None, lambda: becomes(trains, "2"), lambda: None, lambda: finished(AGAIN)])
    done = run("reproduce succeeded --wait")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if line.startswith("team/")] == [
        "team/succeeded-reproduced: Running, train",
        "team/succeeded-reproduced: Succeeded",
        "team/succeeded: nothing differs",
    ]
    # Other records: nobody waits for a training that cannot lead to the same.
    becomes({**trains, "plan": {"hash": "", "dataHash": "0" * 64}}, "3")
    kept = copy.deepcopy(server.objects[f"{JOBS}/{AGAIN}"])
    # The two jobs are read, and the new one once more; after that it is gone.
    after_requests(server, monkeypatch, [*[lambda: None] * 3, lambda: server.objects.pop(f"{JOBS}/{AGAIN}")])
    done = run("reproduce succeeded --wait -o json")
    assert (done.exit_code, "team/succeeded-reproduced: Running" in done.stderr) == (1, True)
    document = json.loads(done.stdout)
    assert [each["rule"] for each in document["findings"]] == ["audit-data-differs"]
    assert (document["comparedResult"], document["runAgainAs"]) == (False, "team/succeeded-reproduced")
    assert run("status succeeded").exit_code == 0
    server.put(JOBS, kept)
    becomes(copy.deepcopy(objects.FAILED["status"]), "4")
    done = run("reproduce succeeded --wait")
    assert done.exit_code == 3
    assert "is Failed, so there is nothing to compare with succeeded; `finetune explain job/succeeded-rep" in done.stderr


def test_results_that_somebody_has_changed_or_that_are_gone_are_told(run: Run, server: ApiServer, finished: Finished) -> None:
    finished("succeeded")
    manifest = server.workspace / "succeeded/merged/manifest.json"
    manifest.write_text(manifest.read_text().replace("m2", "m0"))
    done = run("reproduce succeeded")
    assert (done.exit_code, "merged/manifest.json has the SHA-256 " in done.stderr) == (3, True)
    assert "its status names" in done.stderr
    assert f"{JOBS}/{AGAIN}" not in server.objects, "nothing is trained that cannot be compared"
    for kind in FILES:
        (server.workspace / "succeeded" / kind / "manifest.json").unlink()
    done = run("reproduce succeeded")
    assert (done.exit_code, "none of these files exists: adapter/manifest.json, merged/manifest.json" in done.stderr) == (3, True)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", '{"files": 3}', '{"files": {"a": 1}}', '{"files": [1, {"name": 2}]}'])
def test_a_manifest_of_a_stranger_ends_nothing(text: str) -> None:
    job = seen_job(objects.NEW)
    printed = [{"file": "adapter/manifest.json", "line": text}, {"file": "provenance.json", "line": text}, {"file": 3, "line": 4}]
    with pytest.raises(LocalError, match="none of these files exists:"):
        read_results(job, printed)
    with pytest.raises(LocalError, match=r"merged/manifest.json is longer than can be read"):
        read_results(job, [{"file": "merged/manifest.json", "cut": True}])


def test_a_missing_right_is_named(run: Run, server: ApiServer, finished: Finished) -> None:
    finished("succeeded")
    for right, said in ((("create", "finetunejobs"), "you may not create finetunejobs"), (("create", "pods"), "create pods")):
        server.denied = {right}
        done = run("reproduce succeeded")
        assert (done.exit_code, said in done.stderr) == (3, True)
        assert f"{JOBS}/{AGAIN}" not in server.objects


def test_a_name_that_is_too_long_for_a_file_is_that_of_no_job(run: Run) -> None:
    done = run(f"reproduce {'x' * 300}")
    assert (done.exit_code, done.stderr.partition("xx")[0]) == (2, "there is no FineTuneJob ")
