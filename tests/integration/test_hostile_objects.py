"""A tenant floods the operator, through the API server and with a tenant's rights: nobody else notices.

`HOSTILE_OBJECTS` and `HOSTILE_SEED` extend and repeat a run. On a control plane of its own, which ends with all that was made.
"""

import http.client
import json
import os
import ssl
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_job.names import JOB_KIND, Role
from tests.hostile.objects import Document, Forger, Target, unreadable_job
from tests.integration.operator_process import OperatorProcess
from tests.integration.test_api_rules import as_user
from tests.integration.workload import Workload
from tests.support.audited_plane import AuditedPlane
from tests.support.processor import slowness
from tests.support.source_seed import seed_of_the_sources
from tools.cluster.errors import wait_until
from tools.cluster.processes import Component

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
SEED = int(os.environ.get("HOSTILE_SEED", seed_of_the_sources()))
OBJECTS = int(os.environ.get("HOSTILE_OBJECTS", "1500"))
SHARES = {"FineTuneJob": 0.06, "Pod": 0.3, "Job": 0.14, "ConfigMap": 0.25, "Service": 0.25}
"""A FineTuneJob is worth ten others: each is judged, and answered in its status."""
CLIENTS = 8
KUBELETS_PATCH_ONE_IN = 10
PASS_SECONDS = 0.25
TENANT = "edit-user"
ANSWER_SECONDS = 300.0
"""Deleting thousands of objects is one request."""


class FloodedPlane(AuditedPlane):
    """Without the controllers that look at every pod for every Service: nobody asks for an address here. And without the policy
    for pods with a run's labels, so that the operator gets to see a tenant's.
    """

    chart_values = ("admission.runPods=false",)

    def start(self, name: str, *arguments: str | Path) -> Component:
        """The controller manager leaves those out."""
        if name == "kube-controller-manager":
            left_out = ("endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller")
            arguments = (*arguments, f"--controllers=*,{','.join(f'-{one}' for one in left_out)}")
        return super().start(name, *arguments)


@pytest.fixture(scope="module")
def plane() -> Iterator[AuditedPlane]:
    with FloodedPlane() as running:
        yield running


class Connection:
    """One kept connection to the API server, in one thread. A flood through a full client would measure the client."""

    def __init__(self, server: str, context: ssl.SSLContext, user: str) -> None:
        address = urllib.parse.urlsplit(server)
        assert address.hostname is not None
        self._connection = http.client.HTTPSConnection(address.hostname, address.port, context=context, timeout=ANSWER_SECONDS)
        self._headers = {"Accept": "application/json"} | ({"Impersonate-User": user} if user else {})

    def send(self, method: str, path: str, body: Document, content_type: str = "application/json") -> tuple[int, bytes]:
        """Status and answer; waits where the server asks for it."""
        text = json.dumps(body).encode()
        while True:
            try:
                self._connection.request(method, path, text, self._headers | {"Content-Type": content_type})
                answer = self._connection.getresponse()
                content = answer.read()
            except (ConnectionError, http.client.HTTPException):
                # The server hangs up on what it need not read to the end. The next request opens a new connection.
                self._connection.close()
                return 0, b""
            if answer.status != 429:
                return answer.status, content
            time.sleep(float(answer.headers.get("Retry-After", 1)))


class Flood:
    """Objects of a tenant, and what the kubelets then say of some of the pods."""

    def __init__(self, plane: AuditedPlane, namespace: str, targets: tuple[Target, ...]) -> None:
        self._plane, self._namespace, self._targets = plane, namespace, targets
        identity = plane.authority.sign("flood", "/O=system:masters/CN=flood", "clientAuth")
        self._context = ssl.create_default_context(cafile=plane.authority.certificate)
        self._context.load_cert_chain(identity.certificate, identity.key)
        self._local = threading.local()
        self.answers = Counter[str]()
        self._lock = threading.Lock()

    def run(self, on_part: Callable[[], None]) -> None:
        """Send everything; `on_part` is called ten times in between."""
        kinds = [kind for kind, share in SHARES.items() for _ in range(round(OBJECTS * share))]
        Random(SEED).shuffle(kinds)
        part = max(len(kinds) // 10, 1)
        with ThreadPoolExecutor(CLIENTS) as executor:
            for begin in range(0, len(kinds), part):
                list(executor.map(self._one, range(begin, min(begin + part, len(kinds))), kinds[begin : begin + part]))
                on_part()

    def _one(self, number: int, kind: str) -> None:
        random = Random(f"{SEED}/{number}")
        forger = Forger(random, self._targets)
        make = {
            "FineTuneJob": forger.job, "Pod": forger.pod, "Job": forger.batch_job, "ConfigMap": forger.config_map,
            "Service": forger.service,
        }  # fmt: skip
        body = make[kind](number)
        collection = self._plane.kube.path(kind, self._namespace)
        try:
            code, _ = self.connection(TENANT).send("POST", f"{collection}?fieldValidation=Ignore", body)
        except (ValueError, RecursionError):
            self._count(kind, "no JSON")
            return
        self._count(kind, str(code))
        if kind == "Pod" and code == 201 and number % KUBELETS_PATCH_ONE_IN == 0:
            path = f"{collection}/{body['metadata']['name']}/status"
            code, _ = self.connection("").send("PATCH", path, {"status": forger.status_of_pod()}, "application/merge-patch+json")
            self._count("Pod/status", str(code))

    def connection(self, user: str) -> Connection:
        """This thread's, as that user; as administrator without one."""
        kept: dict[str, Connection] = self._local.__dict__.setdefault("connections", {})
        if user not in kept:
            kept[user] = Connection(self._plane.server, self._context, user)
        return kept[user]

    def _count(self, kind: str, answer: str) -> None:
        with self._lock:
            self.answers[f"{kind} {answer}"] += 1


def samples(process: OperatorProcess, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    status, text = process.fetch("/metrics")
    assert status == 200
    every = [item for family in text_string_to_metric_families(text) for item in family.samples if item.name == name]
    return {tuple(sorted(item.labels.items())): item.value for item in every}


def above(process: OperatorProcess, histogram: str, seconds: float) -> float:
    """How many observations were above the first bound that is not below `seconds`."""
    buckets = {float(dict(labels)["le"]): count for labels, count in samples(process, f"{histogram}_bucket").items()}
    return buckets[float("inf")] - buckets[min(bound for bound in buckets if bound >= seconds)]


def make_team(plane: AuditedPlane, name: str) -> Workload:
    plane.kube.create("Namespace", "", {"metadata": {"name": name}})
    wait_until(lambda: plane.kube.get("ServiceAccount", name, "default"), "the namespace's default ServiceAccount", 60)
    team = Workload(plane.kube, name)
    team.make_claims()
    return team


def target_of(team: Workload, name: str) -> Target:
    batch_job = team.kube.get("Job", team.namespace, f"{name}-preflight-0")
    assert batch_job is not None
    return Target(name, team.job(name)["metadata"]["uid"], batch_job["metadata"]["uid"])


@pytest.mark.timeout(1800)
def test_a_tenants_flood_neither_ends_nor_holds_up_the_operator(plane: AuditedPlane, tmp_path: Path) -> None:
    print(f"HOSTILE_SEED={SEED} HOSTILE_OBJECTS={OBJECTS}")
    victim, hostile = make_team(plane, "victim"), make_team(plane, "hostile")
    as_user(hostile, "edit")
    with plane.operator(tmp_path / "operator.log") as operator:
        operator.wait_for_line("ready")
        victim.apply("steady")
        hostile.apply("own")
        victim.wait_for_pods(Role.PREFLIGHT, name="steady")
        hostile.wait_for_pods(Role.PREFLIGHT, name="own")
        flood = Flood(
            plane, hostile.namespace, (target_of(victim, "steady"), target_of(hostile, "own"), Target("absent", "0" * 36))
        )
        asked: list[float] = []
        begun = time.monotonic()

        def between() -> None:
            assert operator.process.poll() is None, f"HOSTILE_SEED={SEED}: ended with {operator.process.returncode}"
            start = time.monotonic()
            assert operator.fetch("/healthz") == (200, "ok\n")
            asked.append(time.monotonic() - start)

        with ThreadPoolExecutor(1) as another:
            lived = another.submit(live, victim)
            flood.run(between)
            flooded = time.monotonic() - begun
            print(f"the other tenant's jobs took {lived.result():.1f} s")
        told = f"after {flooded:.0f} s: {dict(sorted(flood.answers.items()))}, slowest /healthz {max(asked):.2f} s"
        assert_unharmed(operator, told, {JOB_KIND, "Pod"})
        made = sum(count for answer, count in flood.answers.items() if answer.endswith(" 201"))
        assert made > OBJECTS * 0.6, flood.answers
        assert not [answer for answer in flood.answers if answer.rpartition(" ")[2].startswith("5")], flood.answers
        # All that nobody collected is there when it starts again, one unreadable job at least; then it is deleted at once.
        path = plane.kube.path(JOB_KIND, hostile.namespace)
        assert flood.connection(TENANT).send("POST", path, unreadable_job("unreadable"))[0] == 201
        operator.kill()
        operator.start()
        operator.wait_for_line("ready")
        victim.apply("after")
        victim.wait_for_pods(Role.PREFLIGHT, name="after")
        for kind in ("Pod", "ConfigMap", "Job", JOB_KIND):
            path = plane.kube.path(kind, hostile.namespace)
            assert flood.connection("").send("DELETE", path, {"propagationPolicy": "Background"})[0] == 200
        victim.succeed(Role.PREFLIGHT, name="after")
        victim.wait_for_pods(Role.TRAIN, name="after")
        assert_unharmed(operator, "after a start among them and their deletion", {JOB_KIND})
        assert operator.terminate() == 0


def live(team: Workload) -> float:
    """A well-behaved job continues to its end, and another is accepted meanwhile. Returns the seconds."""
    begun = time.monotonic()
    team.succeed(Role.PREFLIGHT, name="steady")
    team.wait_for_pods(Role.TRAIN, name="steady")
    team.apply("newcomer")
    team.wait_for("Validated", name="newcomer")
    team.succeed(Role.TRAIN, name="steady")
    team.succeed(Role.MERGE, name="steady")
    team.wait_for("Succeeded", name="steady")
    team.wait_for_pods(Role.PREFLIGHT, name="newcomer")
    return time.monotonic() - begun


def assert_unharmed(operator: OperatorProcess, when: str, kinds_with_unreadable: set[str]) -> None:
    slow = slowness()
    unreadable = {dict(labels)["kind"]: count for labels, count in samples(operator, "finetune_unreadable_objects_total").items()}
    results = {dict(labels)["result"]: count for labels, count in samples(operator, "finetune_reconcile_seconds_count").items()}
    late = above(operator, "finetune_loop_lag_seconds", PASS_SECONDS)
    print(
        f"{when}; passes {results}; unreadable {unreadable}; looks at the loop that came over {PASS_SECONDS} s late: {late:.0f}"
    )
    said = f"HOSTILE_SEED={SEED}, {when}"
    assert operator.process.poll() is None, said
    assert [line["event"] for line in operator.lines() if line["event"] in ("ready", "stopping")] == ["ready"], said
    assert above(operator, "finetune_pass_cpu_seconds", PASS_SECONDS * slow) == 0, said
    assert sum(results.values()) > 0, said
    assert results.get("defect", 0) == 0, said
    assert kinds_with_unreadable <= unreadable.keys(), said
