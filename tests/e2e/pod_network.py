"""Connections tried, and listeners opened, from inside a pod or a node: by a process of this machine in its network namespace.

The images of the product hold no shell and no network tools, and what a pod may reach does not depend on who asks.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tools.cluster.cgroups import processes_of_pod
from tools.cluster.errors import ClusterError, wait_until
from tools.cluster.network import NodeNetwork
from tools.cluster.processes import run_command

Address = tuple[str, int]
Answer = Literal["open", "refused", "nothing"]
"""A connection; a refusal by the host itself, which the packet so has reached; no answer at all, as from a dropped packet."""

_TIMEOUT_SECONDS = 1.5
_START_SECONDS = 120.0
_TRY = f"""
import concurrent.futures, json, socket, sys
def answer(target):
    try:
        socket.create_connection(tuple(target), timeout={_TIMEOUT_SECONDS}).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "nothing"
    return "open"
targets = json.load(sys.stdin)
with concurrent.futures.ThreadPoolExecutor(len(targets)) as threads:
    json.dump(list(threads.map(answer, targets)), sys.stdout)
"""
_LISTEN = """
import select, socket, sys
listeners = [socket.create_server((sys.argv[1], int(port))) for port in sys.argv[2:]]
print("listening", flush=True)
while True:
    for ready in select.select(listeners, [], [])[0]:
        ready.accept()[0].close()
"""


OWN_NAMESPACE = Path("/proc/self/ns/net")
"""The network namespace of this process, which holds the bridge."""


def node_namespace(node: NodeNetwork) -> Path:
    """The network namespace of a node."""
    return Path("/run/netns", node.namespace)


def pod_namespace(pod: Mapping[str, Any]) -> Path:
    """The network namespace of a running pod.

    Raises:
        ClusterError: no process of it runs.
    """
    for pid in processes_of_pod(pod["metadata"]["uid"]):
        return Path(f"/proc/{pid}/ns/net")
    raise ClusterError(f"pod {pod['metadata']['name']} has no process: it has ended or has not begun")


def reached_from(namespace: Path, targets: Mapping[str, Address]) -> dict[str, Answer]:
    """Try a TCP connection to each target, all at once, from inside a network namespace."""
    tried = run_command(*_inside(namespace), _TRY, stdin=json.dumps(list(targets.values())))
    return dict(zip(targets, json.loads(tried), strict=True))


@contextmanager
def listening(namespace: Path, address: str, ports: Sequence[int]) -> Iterator[None]:
    """Accept connections inside a network namespace."""
    command = [*_inside(namespace), _LISTEN, address, *map(str, ports)]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "listening\n":
                assert process.stderr is not None
                raise ClusterError(f"nothing listens at {address}, ports {ports}: {process.stderr.read()}")
            yield
        finally:
            process.kill()


@contextmanager
def stopped(pod: Mapping[str, Any], program: str) -> Iterator[None]:
    """Let a pod stand still from the moment when `program` is in a command line of it, so that it cannot end meanwhile."""
    uid = pod["metadata"]["uid"]
    wait_until(lambda: any(map(partial(_runs, program), processes_of_pod(uid))), f"{program} to run", _START_SECONDS)
    try:
        _signal(processes_of_pod(uid), signal.SIGSTOP)
        yield
    finally:
        _signal(processes_of_pod(uid), signal.SIGCONT)


def _runs(program: str, pid: int) -> bool:
    try:
        return program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it has just ended


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _inside(namespace: Path) -> list[str | Path]:
    return ["nsenter", f"--net={namespace}", sys.executable, "-I", "-S", "-c"]
