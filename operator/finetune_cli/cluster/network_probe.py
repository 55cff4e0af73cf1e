"""Finds out whether the cluster's network enforces NetworkPolicies, with two pods that live for seconds.

Whatever happens, the objects are deleted; if the machine dies meanwhile, the pods end by themselves.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from finetune_cli.checks.cluster import NetworkProbe, UnknownFact
from finetune_cli.cluster import probe_objects
from finetune_cli.cluster.client import ClusterClient, RequestError
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.launch import Interruption
from finetune_job.api.profile import FineTuneProfileSpec

_POLL_SECONDS = 0.5
_SEEN = 5
"""Answers in a report."""
_DELETE = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}


class _GivenUpError(Exception):
    """The probe cannot be done; the message says why."""


def probe_network(
    client: ClusterClient, namespace: str, profile: FineTuneProfileSpec, seconds: int, interruption: Interruption
) -> NetworkProbe | UnknownFact:
    """Run the probe for so long at most. Raises LocalError after a signal."""
    probe = _Probe(client, namespace, profile, seconds, interruption)
    try:
        return probe.run()
    except (RequestError, _GivenUpError) as error:
        return UnknownFact(f"the network probe could not be done: {error}")
    finally:
        probe.clean_up()


class _Probe:
    def __init__(
        self, client: ClusterClient, namespace: str, profile: FineTuneProfileSpec, seconds: int, interruption: Interruption
    ) -> None:
        self._client, self._profile, self._seconds, self._interruption = client, profile, seconds, interruption
        self._suffix = secrets.token_hex(4)
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        self._made: list[str] = []
        self._deadline = time.monotonic() + seconds

    def run(self) -> NetworkProbe:
        self._make(self._pods, probe_objects.listener(self._suffix, self._profile, self._seconds))
        address = self._wait("listener", _address)
        self._make(self._pods, probe_objects.asker(self._suffix, self._profile, self._seconds, address))
        reached, let_in, let_out, _, resolved = self._wait("asker", lambda pod: _report(pod, probe_objects.BEFORE))
        before = NetworkProbe(reached_before=reached and let_in and let_out, resolved_before=resolved)
        if not before.reached_before:
            return before
        for policy in probe_objects.policies(self._suffix, self._profile):
            self._make(self._policies, policy)
        reached, let_in, let_out, node, resolved = self._wait("asker", lambda pod: _report(pod, probe_objects.UNDER))
        return NetworkProbe(
            reached_before=True,
            resolved_before=before.resolved_before,
            ingress_denied=not let_in,
            egress_denied=not let_out,
            allowed_reached=reached,
            node_denied=not node,
            resolved=resolved,
        )

    def clean_up(self) -> None:
        """Delete what was made, the last one first. What cannot be deleted is named."""
        left = []
        for path in reversed(self._made):
            try:
                self._client.request("DELETE", path, _DELETE)
            except RequestError as error:
                if error.status != 404:
                    left.append(f"{path} ({error})")
        if left:
            raise LocalError(f"delete what the network probe has left: {'; '.join(left)}", ExitCode.FAILED)

    def _make(self, collection: str, document: dict[str, Any]) -> None:
        # Noted first: a request whose answer is lost may have been carried out.
        self._made.append(f"{collection}/{document['metadata']['name']}")
        self._client.request("POST", collection, document)

    def _wait(self, part: str, observe: Callable[[dict[str, Any]], Any]) -> Any:
        """Wait until `observe` returns something else than None for a pod of the probe, and return it."""
        while True:
            if self._interruption.requested:
                raise LocalError("interrupted", ExitCode.INTERRUPTED)
            pod = self._client.request("GET", f"{self._pods}/{probe_objects.probe_name(self._suffix, part)}")
            value = observe(pod)
            if value is not None:
                return value
            status = pod.get("status", {})
            if status.get("phase") in ("Failed", "Succeeded"):
                raise _GivenUpError(f"its pod {part} ended early: {_reason(status)}")
            if time.monotonic() > self._deadline:
                raise _GivenUpError(f"its pod {part} was not done after {self._seconds} s: {_reason(status)}")
            self._interruption.pause(_POLL_SECONDS)


def _address(pod: dict[str, Any]) -> str | None:
    status = pod.get("status", {})
    running = any("running" in one.get("state", {}) for one in status.get("containerStatuses", []))
    return status.get("podIP") if running else None


def _report(pod: dict[str, Any], container: str) -> list[bool] | None:
    """Read the report of a container: three ports reached, its node reached, a name resolved."""
    status = pod.get("status", {})
    for one in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        ended = one.get("state", {}).get("terminated")
        if one.get("name") != container or ended is None:
            continue
        try:
            seen = json.loads(ended.get("message", ""))
        except ValueError:
            seen = None
        if not (isinstance(seen, list) and len(seen) == _SEEN and all(isinstance(each, bool) for each in seen)):
            raise _GivenUpError(f"its container {container} ended with {ended.get('exitCode')} and no report")
        return seen
    return None


def _reason(status: dict[str, Any]) -> str:
    """Why a pod does not run, as far as its status says it."""
    containers = (*status.get("initContainerStatuses", []), *status.get("containerStatuses", []))
    states = [state for one in containers for state in one.get("state", {}).values()]
    conditions = [one for one in status.get("conditions", []) if one.get("status") != "True"]
    for state in (status, *states, *conditions):
        if state.get("message"):
            return f"{state.get('reason', 'no reason')}: {state['message'][:300]}"
    return next((state["reason"] for state in (status, *states) if state.get("reason")), f"its phase is {status.get('phase')}")
