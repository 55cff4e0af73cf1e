"""The commands for jobs of a cluster, against an API server in memory: what each prints of each kind of job.

What is to be printed is in golden/: one file for each job, and one for the commands that are about many.
"""

import copy
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from finetune_cli.app import app
from finetune_cli.jobs.stored_run import stored_run
from finetune_job.plan.digest import canonical_json
from tests.support.builders import a_job
from tests.support.cases import table
from tests.unit.finetune_cli.cluster.api_server import JOBS, PODS, ApiServer, served
from tests.unit.finetune_cli.jobs import objects
from tests.unit.finetune_cli.manifests import ACCEPTED

GOLDEN = Path(__file__).parent / "golden"
CONFIG_MAPS = "/api/v1/namespaces/team/configmaps"
EVENTS = "/api/v1/namespaces/team/events"
PROFILES = "/apis/finetune.dev/v1alpha1/finetuneprofiles"
Run = Callable[[str], Result]
PROPOSED = re.compile(r"`(finetune (?!explain (?!job/))[^`]+)`|run: +(.+)")
"""What a user is told to type; what a word means has nothing to do with a cluster."""
CONTEXT = "here"
SAVED = 1_772_359_200
"""2026-03-01 10:00:00, in UTC."""
HISTORY = "".join(
    f"{json.dumps(line)}\n"
    for line in (
        {"step": 0, "eval_loss": 2.31},
        *({"step": step, "loss": 2.4 - 0.02 * step} for step in range(1, 51)),
        {"step": 50, "loss": 1.4, "eval_loss": 1.5},
        *({"step": step, "loss": 1.4 - 0.002 * step} for step in range(51, 61)),
        {"step": "x"},
        {"step": 60, "loss": 1.25, "eval_loss": 1.6},
    )
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    kubeconfig = tmp_path / "kubeconfig"
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    for module in ("inspect_jobs", "diagnose_job"):
        monkeypatch.setattr(f"finetune_cli.commands.{module}.utc_now", lambda: objects.NOW)
    monkeypatch.chdir(tmp_path)
    server = ApiServer(workspace=tmp_path / "claim")
    server.put(JOBS, *objects.ALL, objects.HOSTILE)
    for index in (0, 1):
        pod = objects.pod(objects.RUNNING, "train", 1, index)
        server.put(PODS, pod)
        server.logs[f"{PODS}/{pod['metadata']['name']}"] = f"[rank {4 * index}] loss 1.25\x1b[2J\n[rank {4 * index + 1}] ready\n"
    ended = {"terminated": {"exitCode": 44, "reason": "Error"}}
    server.put(PODS, objects.pod(objects.FAILED, "train", 0, 1, "Failed", **ended))
    server.logs[f"{PODS}/failed-train-0-1"] = "[rank 4] CUDA out of memory\n[rank 5] hf_abcdefghijklmnopqrstuv\n"
    waiting = objects.pod(objects.WAITING, "train", 0, 0, "Pending", waiting={"reason": "ContainerCreating"})
    waiting["spec"].pop("nodeName")
    server.put(PODS, waiting)
    event = {
        "metadata": {"name": "event"},
        "type": "Warning",
        "reason": "FailedScheduling",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        "count": 12,
        "lastTimestamp": "2026-03-01T11:58:00Z",
        "involvedObject": {"kind": "Pod", "name": "waiting-train-0-0", "uid": "pod-waiting-train-0-0"},
    }
    server.put(EVENTS, event)
    profile = {"metadata": {"name": "default"}, "spec": {"trainerImage": "trainer:1", "gpu": {"pricePerHour": "2.50"}}}
    server.put(PROFILES, profile)
    with served(server, kubeconfig):
        yield server


@pytest.fixture
def run(server: ApiServer) -> Run:
    return lambda line: CliRunner().invoke(app, shlex.split(line))


def give_workspace(server: ApiServer, name: str) -> Path:
    """The frozen plan of a job, and its folder on the claim."""
    plan = a_job().plan()
    server.put(CONFIG_MAPS, {"metadata": {"name": f"{name}-plan"}, "data": {"plan.json": canonical_json(plan)}})
    folder = server.workspace / plan.workspace.path
    (folder / "logs/train-0").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    return folder


def session(run: Run, lines: list[str]) -> str:
    """Each command with its exit code and what it printed."""
    texts = []
    for line in lines:
        done = run(line)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        texts.append(f"$ finetune {line}\n{done.output}[exit {done.exit_code}]\n")
    return "\n".join(texts)


def check_golden(name: str, found: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(found)
    assert (GOLDEN / name).read_text() == found, f"if this is right, copy {tmp_path / name} to {GOLDEN}"


@pytest.mark.parametrize("name", ["succeeded", "running", "failed", "stalled", "waiting", "new", "hostile", "missing"])
def test_what_is_printed_of_one_job(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "job.yaml").write_text(ACCEPTED.replace("name: tuned", f"name: {name}"))
    lines = [f"status {name}", f"explain job/{name}", f"wait {name} --timeout 0", f"logs {name}", f"status {name} --checkpoints"]
    if name not in ("waiting", "new", "hostile"):
        lines += [
            f"status {name} --curve",
            f"download {name} results",
            f"fork {name} --from newest",
            f"suspend {name}",
            f"resume {name}",
            f"retry {name}",
            f"fork {name} --set training.seed=7",
            f"cancel {name}",
            f"cancel {name} -o json",
            "submit job.yaml",
        ]
    found = session(run, lines)
    assert "\x1b" not in found
    assert "\u202e" not in found
    check_golden(f"{name}.txt", found, tmp_path)


@pytest.mark.parametrize("name", ["succeeded", "failed", "stalled", "new", "running"])
def test_commands_that_are_proposed_name_the_context_that_was_given(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "job.yaml").write_text(ACCEPTED.replace("name: tuned", f"name: {name}"))
    (tmp_path / "two.yaml").write_text(ACCEPTED + "---\n" + ACCEPTED.replace("name: tuned", "name: other"))
    lines = [
        *(f"status {name}", f"explain job/{name}", f"wait {name} --timeout 0", f"logs {name} --stage merge", "submit job.yaml"),
        *(f"fork {name} --from x", f"fork {name} --from newest", f"reproduce {name}", f"suspend {name}", f"retry {name}"),
        *("submit two.yaml --watch", f"cancel {name}"),
    ]
    found = session(run, [f"{line} -n team --context {CONTEXT}" for line in lines])
    proposed = [each for pair in PROPOSED.findall(found) for each in pair if each]
    assert proposed
    for command in (part.strip() for each in proposed for part in each.split(" | ")):
        assert f" -n team --context {CONTEXT}" in command, found


def test_what_is_printed_of_many_jobs(run: Run, tmp_path: Path) -> None:
    lines = [
        *("list", "list -A -l finetune.dev/team=vision", "list -l finetune.dev/team=x"),
        *("cost", "cost -A --by profile", "cost --by label:finetune.dev/team", "cost --by colour"),
        *("wait running --for colour", "logs running --rank 8"),
    ]
    check_golden("many.txt", session(run, lines), tmp_path)


def test_a_profile_that_cannot_be_read_is_named_with_the_reason_and_leaves_out_its_jobs(run: Run, server: ApiServer) -> None:
    before = run("cost").stdout
    job = copy.deepcopy(objects.RUNNING)
    job["metadata"]["name"], job["spec"]["profile"] = "other", "later"
    server.put(JOBS, job)
    server.put(PROFILES, {"metadata": {"name": "later"}, "spec": {"trainerImage": 3, "gpu": {}}})
    done = run("cost")
    reason = "trainerImage: Input should be a valid string"
    note = f"note: jobs of the profile later are left out, because this release cannot read it: {reason}\n"
    assert (done.exit_code, done.stdout) == (0, before + note)


@pytest.mark.parametrize("name", ["succeeded", "running", "failed", "stalled", "new", "hostile"])
def test_every_answer_is_data_too(run: Run, name: str) -> None:
    of_many = ("list", "cost") if name == "hostile" else ()
    for line in (f"status {name}", f"explain job/{name}", f"wait {name} --timeout 0", *of_many):
        done = run(f"{line} -o json")
        assert json.loads(done.stdout), line
        assert done.stdout.replace("\n", "").isprintable()
    status = json.loads(run(f"status {name} -o json").stdout)
    assert (status["namespace"], status["name"]) == ("team", name)


def test_a_pod_reads_logs_and_checkpoints_of_pods_that_are_gone(run: Run, server: ApiServer, tmp_path: Path) -> None:
    folder = give_workspace(server, "succeeded")
    (folder / "logs/train-0/rank-00000.log").write_text("loss 2.4\nloss 1.2\x1b[2J\n")
    (folder / "logs/train-0/rank-00005.log").write_text("ready\n")
    (folder / "logs/train-0/out.log").symlink_to("/etc/passwd")
    (folder / "history.jsonl").write_text(HISTORY)
    for step, complete in ((50, True), (60, True), (70, False)):
        checkpoint = folder / f"checkpoints/step-{step:010d}"
        checkpoint.mkdir()
        (checkpoint / "rank-00000.safetensors").write_bytes(b"0" * (1 << 20))
        if complete:
            (checkpoint / "manifest.json").write_text("{}")
        os.utime(checkpoint, (SAVED + step, SAVED + step))
    (folder / "checkpoints/latest").write_text("step-0000000060")
    asked = ["", "--rank 0 --tail 1", "--rank 1", "--stage merge", "--failed", "--since 10m"]
    lines = [
        *(f"logs succeeded {each}".strip() for each in asked),
        "status succeeded --checkpoints",
        "status succeeded --curve",
        "status succeeded --curve --checkpoints",
    ]
    check_golden("workspace.txt", session(run, lines), tmp_path)
    stored = json.loads(run("status succeeded --checkpoints -o json").stdout)["checkpoints"]
    assert stored[0] == {
        "step": 50,
        "saved": "2026-03-01T10:00:50+00:00",
        "complete": True,
        "bytes": (1 << 20) + 2,
        "loss": 1.4,
        "evalLoss": 1.5,
        "best": True,
    }
    assert [(each["step"], each["complete"], each["loss"]) for each in stored[1:]] == [(60, True, 1.25), (70, False, None)]
    assert json.loads(run("status succeeded -o json").stdout)["checkpoints"] is None
    assert [path for path in server.objects if "reader" in path] == [], "every reader pod is deleted"


def test_a_reader_pod_is_one_that_a_restricted_namespace_admits(
    run: Run, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_workspace(server, "succeeded")
    made = []
    create = server._create
    monkeypatch.setattr(
        server, "_create", lambda path, document: (made.append(json.loads(json.dumps(document))), create(path, document))
    )
    run("status succeeded --checkpoints")
    (pod,) = made
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert "finetune.dev/job-uid" not in pod["metadata"]["labels"], "no policy, account or operator may take it for the run's"
    assert (spec["activeDeadlineSeconds"], spec["automountServiceAccountToken"], spec["restartPolicy"]) == (300, False, "Never")
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["image"].startswith("registry.example/trainer@sha256:")
    assert container["volumeMounts"][0]["readOnly"] is True


def test_a_reader_pod_that_cannot_run_is_said_and_deleted(run: Run, server: ApiServer) -> None:
    give_workspace(server, "succeeded")
    server.runs_pods = False
    done = run("status succeeded --checkpoints")
    assert done.exit_code == 3
    assert "did not do so (Error: no such claim)" in done.output
    assert [path for path in server.objects if "reader" in path] == []
    server.denied = {("create", "pods")}
    done = run("status succeeded --checkpoints")
    assert "you may not create pods in the namespace team" in done.output
    server.denied = {("delete", "pods")}
    done = run("status succeeded --checkpoints")
    assert "delete what was left: /api/v1/namespaces/team/pods/finetune-reader-" in done.output


def test_followed_logs_of_all_pods_are_printed_until_they_end(run: Run, server: ApiServer) -> None:
    done = run("logs running -f")
    assert [one for one in server.asked if "/log" in one and "container=trainer" not in one] == []
    assert sorted(done.output.splitlines()) == [
        "[running-train-1-0] [rank 0] loss 1.25\\x1b[2J",
        "[running-train-1-0] [rank 1] ready",
        "[running-train-1-1] [rank 4] loss 1.25\\x1b[2J",
        "[running-train-1-1] [rank 5] ready",
    ]


@pytest.mark.parametrize(
    ("denied", "line", "code", "said"),
    table(__file__, "test_a_missing_right_is_named"),
)  # fmt: skip
def test_a_missing_right_is_named(run: Run, server: ApiServer, denied: list[str], line: str, code: int, said: str) -> None:
    server.denied = {tuple(denied)}
    done = run(line)
    assert (done.exit_code, said in " ".join(done.output.split())) == (code, True), done.output


@pytest.mark.parametrize(("gpu", "denied", "said"), table(__file__, "test_a_patch_for_host_memory_depends_on_the_profile"))
def test_a_patch_for_host_memory_depends_on_the_profile(
    run: Run, server: ApiServer, gpu: dict[str, Any], denied: bool, said: str
) -> None:
    job = copy.deepcopy(objects.FAILED)
    job["status"]["attempts"][-1] |= {"failure": "HostOutOfMemory", "hint": "", "evidence": []}
    server.put(JOBS, job)
    server.put(PROFILES, {"metadata": {"name": "default"}, "spec": {"trainerImage": "trainer:1", **gpu}})
    if denied:
        server.denied = {("get", "finetuneprofiles")}
    done = run("explain job/failed")
    assert (done.exit_code, said in " ".join(done.output.split())) == (0, True), done.output
    assert ("patch: " in done.output) == (not gpu and not denied)


def test_a_history_that_a_stranger_wrote_is_read_as_far_as_it_goes(run: Run, server: ApiServer) -> None:
    lines = ["[" * 100_000, '{"step": 1, "loss": 1' + "0" * 400 + "}", '{"step": 2, "loss": true}', '{"step": 3, "loss": 1.5}']
    (give_workspace(server, "succeeded") / "history.jsonl").write_text("\n".join(lines))
    done = run("status succeeded --curve")
    assert (done.exit_code, "curve:  ▁  1.5 to 1.5\n" in done.output) == (0, True), done.output
    assert "the history is long" not in done.output


def test_results_that_are_published_are_not_downloaded_from_the_workspace(run: Run, server: ApiServer) -> None:
    plan = a_job().spec("output.destination", "oci://registry.example/team/tuned:v1").plan()
    server.put(CONFIG_MAPS, {"metadata": {"name": "succeeded-plan"}, "data": {"plan.json": canonical_json(plan)}})
    done = run("download succeeded results")
    assert (done.exit_code, done.output) == (
        2,
        "team/succeeded: its results are published at oci://registry.example/team/tuned:v1; read them from there\n",
    )


@pytest.mark.parametrize("size", [10**400, -1, True, "4"])
def test_a_size_that_no_directory_has_counts_as_none(size: object) -> None:
    run = stored_run([{"file": "checkpoints/step-0000000010", "directory": True, "complete": True, "bytes": size}])
    assert [(each.step, each.is_complete, each.bytes) for each in run.checkpoints] == [(10, True, 0)]


@pytest.mark.parametrize("time", [10**400, 1e300, -1e300, True, "4", None])
def test_a_time_that_no_directory_has_counts_as_none(time: object) -> None:
    run = stored_run([{"file": "checkpoints/step-0000000010", "directory": True, "complete": True, "time": time}])
    assert [each.saved for each in run.checkpoints] == [None]


def test_a_curve_without_its_beginning_is_told(run: Run, server: ApiServer) -> None:
    history = "".join(f'{{"step": {step}, "loss": 2.0, "more": "{"x" * 1000}"}}\n' for step in range(5000))
    (give_workspace(server, "succeeded") / "history.jsonl").write_text(history)
    assert "the history is long: only the losses at its end were read" in run("status succeeded --curve").output


def test_an_object_that_is_nested_too_deeply_ends_no_command_with_a_traceback(run: Run, server: ApiServer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(450):
        deep = {"a": deep}
    server.put(JOBS, {**objects.FAILED, "spec": {**objects.FAILED["spec"], "settings": deep}})
    done = run("fork failed")
    assert (done.exit_code, done.output) == (3, "the input is nested too deeply\n")


def test_restarts_inside_a_pod_are_shown_with_their_attempt(run: Run, server: ApiServer) -> None:
    job = copy.deepcopy(objects.RUNNING)
    (first,) = [one for one in job["status"]["attempts"] if (one["role"], one["number"]) == ("train", 0)]
    first |= {"nodes": None, "restarts": [{"failure": "Internal", "message": "rank 1 was killed by signal 9"}]}
    server.put(JOBS, job)
    command = f"status {objects.RUNNING['metadata']['name']}"
    (line,) = [line for line in run(command).output.splitlines() if "train-0 " in line]
    assert line.startswith("  train-0  Failed, 1 restart in its pod ")
    first["restarts"] *= 2
    server.put(JOBS, job)
    assert "Failed, 2 restarts in its pod " in run(command).output


def test_a_local_run_is_asked_for_by_an_option(run: Run, tmp_path: Path, server: ApiServer) -> None:
    server.asked.clear()
    for line in ("list --local", "status", "list --claims elsewhere"):
        done = run(line)
        assert (done.exit_code, "no job was run below" in done.output) == (0, True)
    done = run("status running --local")
    assert (done.exit_code, done.output) == (
        2,
        "running: no such run below runs/claims; `finetune list --claims runs/claims` lists the existing ones\n",
    )
    assert server.asked == []


def after_requests(server: ApiServer, monkeypatch: pytest.MonkeyPatch, changes: list[Callable[[], object]]) -> None:
    """Each change is made after one more request, the first one after the first."""
    monkeypatch.setattr("finetune_cli.commands.follow.POLL_SECONDS", 0.0)
    answer, waiting = server.answer, list(changes)

    def answer_and_change(method: str, target: str, body: bytes) -> tuple[int, str]:
        found = answer(method, target, body)
        if waiting:
            waiting.pop(0)()
        return found

    monkeypatch.setattr(server, "answer", answer_and_change)


def with_version(document: objects.Document, version: str, **progress: object) -> objects.Document:
    changed = copy.deepcopy(document)
    changed["metadata"]["resourceVersion"] = version
    changed["status"]["progress"] |= progress
    return changed


@pytest.mark.parametrize("command", ["list", "status running"])
def test_a_single_look_that_gets_no_answer_has_failed(run: Run, server: ApiServer, command: str) -> None:
    server.fails[JOBS if command == "list" else f"{JOBS}/running"] = 1
    done = run(command)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "503" in done.stderr
    assert "trying again" not in done.stderr


def test_a_watched_list_prints_each_job_that_changes(run: Run, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [
        lambda: server.put(JOBS, with_version(objects.RUNNING, "2", step=61)),
        lambda: server.fails.update({JOBS: 1}),
        lambda: None,
        lambda: server.denied.add(("list", "finetunejobs")),
    ]
    after_requests(server, monkeypatch, changes)
    done = run("list -w")
    assert done.exit_code == 3
    first, *rest = done.stdout.splitlines()
    assert first.startswith("NAME ")
    assert [line.split()[:4] for line in rest[7:]] == [["running", "Running", "train", "61/200"]]
    assert "503" in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[0].endswith("; trying again")
    assert "you may not list finetunejobs" in done.stderr.splitlines()[1]


def test_a_watched_status_draws_the_losses_until_the_job_has_ended(
    run: Run, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = copy.deepcopy(objects.SUCCEEDED)
    ended["metadata"] |= {"name": "running", "resourceVersion": "4"}
    changes = [
        lambda: server.put(JOBS, with_version(objects.RUNNING, "2", step=61, loss="1.0")),
        lambda: None,
        lambda: server.put(JOBS, ended),
    ]
    after_requests(server, monkeypatch, changes)
    done = run("status running -w")
    assert done.exit_code == 0
    steps = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("    steps:")]
    curves = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("    curve:")]
    assert steps == ["60/200", "61/200", "100/100"]
    assert [curve[0] for curve in curves] == ["▁", "█▁", "█▄▁"]


def test_ctrl_c_ends_a_command_without_a_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune_cli.commands.follow.outcome", interrupted)
    done = run("wait running")
    assert (done.exit_code, done.output) == (130, "")
