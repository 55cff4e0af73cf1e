"""Attacks of a tenant on a colleague's job, on real nodes and with the tenant's own token: each is refused with its reason.

The tenant may make pods, mount claims, and see, suspend and retry jobs of the namespace, and may read no Secret. From a notebook
that mounts the job's workspace, things are planted between two stages or attempts. One job meets them all and succeeds at last.
"""

import hashlib
import json
import shlex
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_job.names import OBSERVE_PORT, Role
from tests.e2e.pod_network import pod_namespace, reached_from, stopped
from tests.e2e.publishing import LOGIN_SECRET, PROFILE, REPOSITORY, keep_login, publishing_registry
from tests.e2e.surroundings import RESTRICTED_CONTAINER
from tests.support.installed_chart import as_account
from tests.support.registry import PASSWORD, NotThereError, Registry
from tools.cluster.errors import ClusterError
from tools.cluster.processes import run_command
from tools.stack import NAMESPACE, RELEASE, ROOT, SYSTEM_NAMESPACE, USER_ID, Stack, condition_of

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]
NAME = "attacked"
EXAMPLE = "examples/quickstart.yaml"
TENANT = "tenant"
GROUP = 65532
"""The profile's `fsGroup`: the kubelet gives a volume to one group at a time."""
CANARY = "canary-of-the-tenant"
TEXT = "\x1b[2J\x1b]0;owned\x07<script>alert('run')</script>\u202e"
"""Clears a terminal, names its window, runs in a page, and turns what follows around."""
EVERY, STEPS = 10, 60
FORGED_STEP = 77_777
POLLS_SECONDS = 17.0
"""In which rank 0 is asked three times."""
CONTROL = {"Cc", "Cf"}
"""Categories of Unicode: controls of terminals, and those that turn text around or hide it."""


class Tenant:
    """Who has one token, and a notebook."""

    def __init__(self, stack: Stack, directory: Path) -> None:
        self._stack = stack
        kubeconfig = as_account(stack.cluster, TENANT, NAMESPACE, directory)
        self.environment = {**stack.cluster.environment, "KUBECONFIG": str(kubeconfig)}

    def kubectl(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002 - as in subprocess.run
        command = shlex.split(self._stack.cluster.kubectl_command)
        return run_command(*command, "--namespace", NAMESPACE, *arguments, stdin=input, environment=self.environment)

    def pod(
        self,
        name: str,
        command: list[str],
        labels: dict[str, str],
        annotations: dict[str, str],
        *claims: str,
        kubectl: Callable[..., str] | None = None,
    ) -> None:
        """kubectl: of somebody else, who makes it."""
        kubectl = kubectl or self.kubectl
        container = {
            "name": "main",
            "image": self._stack.trainer_image,
            "imagePullPolicy": "Never",
            "command": command,
            "securityContext": RESTRICTED_CONTAINER | {"runAsUser": USER_ID},
            "volumeMounts": [{"name": claim, "mountPath": f"/claims/{claim}"} for claim in claims],
        }
        spec = {
            "containers": [container],
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 60,
            "securityContext": {"fsGroup": GROUP},
            "volumes": [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims],
        }
        metadata = {"name": name, "labels": labels, "annotations": annotations}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        kubectl("apply", "-f", "-", input=json.dumps(body))
        kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=120s")

    def run(self, script: str) -> str:
        """A program in the notebook; `job` is the job's directory on the workspace."""
        here = f"import pathlib\njob, = pathlib.Path('/claims/workspace').glob('{NAME}-????????')\n"
        return self.kubectl("exec", "--stdin", "notebook", "--", "python", "-I", "-", input=here + script)

    def change_run(self, **run: Any) -> None:
        self.kubectl("patch", "finetunejob", NAME, "--type", "merge", "--patch", json.dumps({"spec": {"run": run}}))


RIGHTS = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "watch", "patch", "delete"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
    {"apiGroups": [""], "resources": ["pods/log", "configmaps"], "verbs": ["get"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]},
]


def give_rights(stack: Stack) -> None:
    """Those of the chart's role for users, and those of somebody who has notebooks."""
    subjects = [{"kind": "ServiceAccount", "name": TENANT, "namespace": NAMESPACE}]
    group = "rbac.authorization.k8s.io"
    place = {"namespace": NAMESPACE}
    bindings = {
        "notebooks": ("Role", "notebooks"),
        "jobs": ("ClusterRole", f"{RELEASE}-finetune-operator-{SYSTEM_NAMESPACE}-user"),
    }
    stack.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": TENANT, **place}},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "notebooks", **place}, "rules": RIGHTS},
        *(
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": f"{TENANT}-{name}", **place},
                "roleRef": {"apiGroup": group, "kind": kind, "name": role},
                "subjects": subjects,
            }
            for name, (kind, role) in bindings.items()
        ),
    )


FORGING = f"""
import http.server, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Forged(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"attempt": 0, "step": {FORGED_STEP:d}, "total_steps": {FORGED_STEP:d}, "loss": 0.5}}')
        print("asked for", self.path, flush=True)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("", {OBSERVE_PORT}), Forged).serve_forever()
"""
OF_THE_JOB_CONTROLLER = "batch.kubernetes.io/"

PLANT = f"""
import hashlib, json, os, pickle, shutil
class Owned:
    def __reduce__(self):
        return os.system, ("touch /claims/workspace/{CANARY}",)
root = job / "checkpoints"
own = sorted(path for path in root.iterdir() if path.name.startswith("step-") and (path / "manifest.json").is_file())
newest, before = own[-1], own[-2]
def planted(step):
    path = root / f"step-{{step:010d}}"
    shutil.copytree(newest, path)
    return path
# Whole and of the right step by its manifest, and another run's.
foreign = planted(9001)
body = json.loads((foreign / "manifest.json").read_text())
del body["sha256"]
body["step"], body["origin"]["learning_sha256"] = 9001, "e" * 64
canonical = lambda value: (json.dumps(value, sort_keys=True, separators=(",", ":")) + "\\n").encode()
body["sha256"] = hashlib.sha256(canonical(body)).hexdigest()
(foreign / "manifest.json").write_bytes(canonical(body))
# As torch's distributed checkpoints are.
pickled = root / "step-0000009002"
pickled.mkdir()
for name in ("manifest.json", ".metadata", "rank-00000.safetensors"):
    (pickled / name).write_bytes(pickle.dumps(Owned()))
linked = planted(9003)
(linked / "manifest.json").unlink()
(linked / "manifest.json").symlink_to("/plan/plan.json")
(root / "latest").write_text("step-0000009002\\n")
(root / "planted.tmp-x").symlink_to("/claims")
(root / "step-0000000001").write_text("no directory")
file = newest / "rank-00000.safetensors"
content = bytearray(file.read_bytes())
content[-1] ^= 1
file.write_bytes(content)
print(json.dumps([newest.name, before.name]))
"""

CHANGE = """
path = job / {name!r}
path.with_name("kept").write_bytes(path.read_bytes())
content = bytearray(path.read_bytes())
content[-{length}:] = {canary!r}
path.write_bytes(content)
"""
RESTORE = """
path = job / {name!r}
path.unlink()
path.with_name("kept").rename(path)
"""


@dataclass
class Seen:
    """What came of each attack."""

    forged: dict[str, list[str]] = field(default_factory=dict)
    """What the forging pod was asked, by its disguise."""
    owners: dict[str, list[str]] = field(default_factory=dict)
    """Of that pod."""
    refused_pod: str = ""
    """What the API server said to a pod of the tenant's with the labels of the run."""
    reachable: bool = False
    """Whether the operator had a way to it."""
    steps: set[int] = field(default_factory=set)
    """That status said while it was there."""
    newest: str = ""
    before: str = ""
    refusals: dict[str, str] = field(default_factory=dict)
    """What the condition says, by attack."""
    statuses: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, bool] = field(default_factory=dict)
    """Whether anything was at the destination then."""
    job: dict[str, Any] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)
    sums: str = ""
    """SHA256SUMS before anybody changed anything."""


@pytest.fixture(scope="module")
def registry(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with publishing_registry(stack, tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def seen(stack: Stack, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    give_rights(stack)
    tenant, seen = Tenant(stack, tmp_path_factory.mktemp("tenant")), Seen()
    with (stack.claim("data") / "validation.jsonl").open() as validation:
        records = [json.loads(line) for line in validation]
    for record in records:
        record["prompt"] = f"{TEXT}\n{record['prompt']}"
    tenant.pod("notebook", ["sleep", "infinity"], {}, {}, "workspace", "data")
    tenant.kubectl(
        *("exec", "--stdin", "notebook", "--", "python", "-I", "-c"),
        "import sys; open('/claims/data/hostile.jsonl', 'w').write(sys.stdin.read())",
        input="".join(f"{json.dumps(record)}\n" for record in records),
    )
    keep_login(stack, replace(registry, login=("publisher", "not-the-password")))
    example = yaml.safe_load((ROOT / EXAMPLE).read_text())["spec"]
    stack.apply_example(
        EXAMPLE,
        {
            "profile": PROFILE,
            "preflight": {"rehearsal": "Skip"},
            "data": example["data"] | {"validation": {"source": "pvc://data/hostile.jsonl"}},
            "training": example["training"] | {"maxSteps": STEPS},
            "checkpoint": {"everySteps": EVERY},
            "evaluation": {},
            "run": {"maxRestarts": 0},
            "output": {
                "destination": f"oci://{registry.host}/{REPOSITORY}:v1",
                "secretRef": {"name": LOGIN_SECRET},
                "sampleAnswers": 2,
            },
        },
        name=NAME,
    )
    _forge_progress(stack, tenant, seen)
    _plant_checkpoints(stack, tenant, seen)
    _poison(stack, tenant, registry, seen)
    tenant.kubectl("delete", "pods", "--selector", f"finetune.dev/job={NAME},finetune.dev/role=train")
    tenant.run(f"for log in (job / 'logs').glob('train-*/*'): log.open('a').write({TEXT!r} + 'end of it')")
    for command in (("status", NAME), ("logs", NAME, "--stage", "train"), ("list",)):
        program = Path(sys.executable).with_name("finetune")
        seen.printed[command[0]] = run_command(program, *command, "--namespace", NAMESPACE, environment=tenant.environment)
    yield seen
    tenant.kubectl("delete", f"finetunejob/{NAME}", "pod/notebook", "--grace-period=1", "--timeout=200s")


def _forge_progress(stack: Stack, tenant: Tenant, seen: Seen) -> None:
    """Rank 0 is busy and does not answer; a pod with its labels does, and then one that its Job has adopted."""
    stack.wait_for_step(NAME, EVERY)
    (rank_zero,) = stack.pods(NAME, Role.TRAIN)
    metadata = rank_zero["metadata"]
    ours = {name: value for name, value in metadata["labels"].items() if OF_THE_JOB_CONTROLLER not in name}
    ours = {name: value for name, value in ours.items() if name not in ("controller-uid", "job-name")}
    with stopped(rank_zero, "finetune_trainer"):
        try:
            tenant.pod("forger", ["python", "-I", "-c", FORGING], ours, {})
        except ClusterError as error:
            seen.refused_pod = str(error)
        # As on a cluster whose chart has no policy for such pods.
        admin = partial(stack.cluster.kubectl, "--namespace", NAMESPACE)
        tenant.pod("forger", ["python", "-I", "-c", FORGING], ours, {}, kubectl=admin)
        (forger,) = [pod for pod in stack.objects("pods") if pod["metadata"]["name"] == "forger"]
        stack.policies.settle()
        way = {"forger": (forger["status"]["podIP"], OBSERVE_PORT)}
        seen.reachable = reached_from(pod_namespace(stack.operator_pod()), way)["forger"] == "open"
        for disguise in ("labels", "adopted"):
            if disguise == "adopted":
                marks = {"labels": metadata["labels"], "annotations": metadata["annotations"]}
                tenant.kubectl("patch", "pod", "forger", "--type", "merge", "--patch", json.dumps({"metadata": marks}))
            end = time.monotonic() + POLLS_SECONDS
            while time.monotonic() < end:
                seen.steps.add(stack.job(NAME)["status"]["progress"]["step"])
                time.sleep(0.5)
            forger = json.loads(tenant.kubectl("get", "pod", "forger", "--output", "json"))
            seen.owners[disguise] = [owner["name"] for owner in forger["metadata"].get("ownerReferences", [])]
            seen.forged[disguise] = tenant.kubectl("logs", "forger").splitlines()
        tenant.kubectl("delete", "pod", "forger", "--grace-period=0", "--force", "--ignore-not-found")


def _plant_checkpoints(stack: Stack, tenant: Tenant, seen: Seen) -> None:
    """Between two attempts; afterwards the operator is away, so that training ends and no merge begins."""
    tenant.change_run(suspend=True)
    stack.wait_for_condition(NAME, "Suspended")
    stack.wait(lambda: not stack.pods(NAME, Role.TRAIN), "the pods to go")
    seen.newest, seen.before = json.loads(tenant.run(PLANT))
    tenant.change_run(suspend=False)
    stack.wait(lambda: [pod for pod in stack.pods(NAME, Role.TRAIN) if pod["status"].get("podIP")], "the next attempt")
    _scale_operator(stack, 0)
    stack.wait(lambda: any(job["status"].get("succeeded") for job in stack.batch_jobs(NAME, Role.TRAIN)), "the end of training")


def _scale_operator(stack: Stack, replicas: int) -> None:
    place = ("--namespace", SYSTEM_NAMESPACE, "deployment", "--selector", "app.kubernetes.io/name=finetune-operator")
    stack.cluster.kubectl("scale", *place, f"--replicas={replicas}")
    if replicas:
        stack.cluster.kubectl("rollout", "status", *place, "--timeout=120s")
    else:
        pods = ("pods", "--namespace", SYSTEM_NAMESPACE, "--selector", "app.kubernetes.io/name=finetune-operator")
        stack.cluster.kubectl("wait", *pods, "--for=delete", "--timeout=60s")


def _poison(stack: Stack, tenant: Tenant, registry: Registry, seen: Seen) -> None:
    retries = 0

    def refused(attack: str, undo: str = "") -> None:
        """Wait for the refusal, note it, undo the attack, and let the role look again."""
        nonlocal retries

        def stalled() -> dict[str, Any] | None:
            job = stack.job(NAME)
            assert condition_of(job, "Finished").get("status") != "True", f"{attack} was not refused: {job['status']}"
            is_looked_at = job["status"].get("retryHandled", 0) == retries
            return job if is_looked_at and condition_of(job, "Stalled").get("status") == "True" else None

        job = stack.wait(stalled, f"the refusal of {attack}")
        seen.refusals[attack] = f"{condition_of(job, 'Stalled')['reason']}: {condition_of(job, 'Stalled')['message']}"
        seen.statuses.append(job["status"])
        seen.left[attack] = _anything_left(registry)
        if undo:
            tenant.run(undo)

    def again() -> None:
        nonlocal retries
        retries += 1
        tenant.change_run(retry=retries)

    def changed(name: str) -> tuple[str, str]:
        canary = CANARY.encode()
        return CHANGE.format(name=name, length=len(canary), canary=canary), RESTORE.format(name=name)

    change, restore = changed("trained/adapter_model.safetensors")
    tenant.run(change)
    _scale_operator(stack, 1)
    refused("a changed adapter", restore)
    again()
    refused("a wrong password")
    keep_login(stack, registry)
    seen.sums = tenant.run("print((job / 'results/SHA256SUMS').read_text(), end='')")
    names = [line.partition("  ")[2] for line in seen.sums.splitlines()]
    weights = min(name for name in names if name.endswith(".safetensors") and "/" not in name)
    credentials = "../../../../credentials/registry/config.json"
    sums, sums_as_they_were = changed("results/SHA256SUMS")
    line = f"{'0' * 64}  {credentials}{TEXT}\n"
    attacks = {
        "changed weights": changed(f"results/merged/{weights}"),
        "a name that leaves": (f"{sums}\npath.write_text(path.with_name('kept').read_text() + {line!r})", sums_as_they_were),
        "a link": (
            f"{changed('results/merged/config.json')[0]}\npath.unlink()\npath.symlink_to('../{credentials}')",
            RESTORE.format(name="results/merged/config.json"),
        ),
    }
    for attack, (act, undo) in attacks.items():
        tenant.run(act)
        again()
        refused(attack, undo)
    again()
    seen.job = stack.wait_for_condition(NAME, "Finished")


def _anything_left(registry: Registry) -> bool:
    """Whether the destination has a result, or a byte of what must not leave."""
    try:
        registry.digest(REPOSITORY, "v1")
        return True
    except NotThereError:
        files = [path for path in registry.storage.rglob("*") if path.is_file()]
        return any(word.encode() in path.read_bytes() for path in files for word in (CANARY, PASSWORD))


def texts_of(value: Any) -> Iterator[str]:
    """All texts of a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *texts_of(item))
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def controls(text: str) -> set[str]:
    return {letter for letter in text if letter != "\n" and unicodedata.category(letter) in CONTROL}


def test_progress_is_that_of_the_pod_of_the_run_whoever_bears_its_labels(seen: Seen) -> None:
    assert "are for pods that the operator's Jobs make" in seen.refused_pod
    assert seen.reachable, "the operator could have asked"
    assert seen.owners == {"labels": [], "adopted": [f"{NAME}-train-0"]}
    assert seen.forged == {"labels": [], "adopted": []}
    assert FORGED_STEP not in seen.steps


def test_planted_checkpoints_are_passed_over_with_the_reason_and_nothing_of_them_runs(stack: Stack, seen: Seen) -> None:
    workspace = stack.workspace(NAME)
    logs = "".join(path.read_text(errors="replace") for path in sorted((workspace / "logs").glob("train-*/*")))
    passed_over = [line for line in logs.splitlines() if "is not used" in line]
    for name, reason in {
        "step-0000009003": "manifest.json cannot be read",
        "step-0000009002": "manifest.json cannot be read",
        "step-0000009001": "belongs to run eeee",
        seen.newest: "was written",
    }.items():
        assert any(name in line and reason in line for line in passed_over), (name, passed_over)
    assert not (stack.claim("workspace") / CANARY).exists()
    lines = [json.loads(line) for line in (workspace / "history.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    repeated = [step for before, step in pairwise(steps) if step <= before]
    assert [step - 1 for step in repeated] in ([], [int(seen.before.removeprefix("step-"))])
    assert steps[-1] == STEPS


def test_changed_weights_and_foreign_names_go_nowhere(seen: Seen) -> None:
    for attack, reasons in {
        "a changed adapter": ("MergeStopped: merge/CheckpointInvalid", "is not what was trained: its sha256 differs"),
        "a wrong password": ("PublishRefused: publish/DestinationRefused", ""),
        "changed weights": ("PublishRefused: publish/CheckpointInvalid", "sha256 is not"),
        "a name that leaves": ("PublishRefused: publish/CheckpointInvalid", "Nothing was read or sent"),
        "a link": ("PublishRefused: publish/CheckpointInvalid", "a merge writes only plain files. Nothing was read or sent"),
    }.items():
        assert all(reason in seen.refusals[attack] for reason in reasons), (attack, seen.refusals[attack])
    assert seen.left == dict.fromkeys(seen.refusals, False)


def test_the_job_succeeds_in_the_end_with_what_was_trained(seen: Seen, registry: Registry) -> None:
    assert condition_of(seen.job, "Succeeded").get("status") == "True", json.dumps(seen.job["status"], indent=2)
    pulled = registry.pull(REPOSITORY, "v1")
    assert pulled["SHA256SUMS"].decode() == seen.sums
    for line in seen.sums.splitlines():
        sha256, _, name = line.partition("  ")
        assert hashlib.sha256(pulled[name]).hexdigest() == sha256, name


def test_no_text_of_a_tenant_controls_a_terminal_or_runs_in_a_page(seen: Seen, registry: Registry) -> None:
    assert [text for text in texts_of([*seen.statuses, seen.job["status"]]) if controls(text)] == []
    assert {name: controls(text) for name, text in seen.printed.items()} == {"status": set(), "logs": set(), "list": set()}
    assert "end of it" in seen.printed["logs"], "the log of the workspace was read"
    pulled = registry.pull(REPOSITORY, "v1")
    assert "&lt;script&gt;alert" in pulled["report.html"].decode()
    for name in ("report.html", "README.md"):
        page = pulled[name].decode()
        assert "<script>alert" not in page
        assert controls(page) == set()
