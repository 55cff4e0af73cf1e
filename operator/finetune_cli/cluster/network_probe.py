"""Finds out whether the cluster's network enforces NetworkPolicies, with two short-lived pods.

The objects are always deleted afterwards; if this machine dies first, the pods end by themselves.
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
from finetune_cli.cluster.short_lived_pod import DELETE_NOW
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.launch import Interruption
from finetune_job.api.profile import FineTuneProfileSpec

_POLL_SECONDS = 0.5
_ANSWERS = 5
"""Number of answers in a report: one for each of three ports, one for the node, one for resolving a name."""


class _GivenUpError(Exception):
    """The probe cannot be completed; the message says why."""


def probe_network(
    client: ClusterClient, namespace: str, profile: FineTuneProfileSpec, seconds: int, interruption: Interruption
) -> NetworkProbe | UnknownFact:
    """Run the probe for at most `seconds`. Raises LocalError after a signal, or if an object cannot be deleted."""
    suffix, deadline = secrets.token_hex(4), time.monotonic() + seconds
    pods = f"/api/v1/namespaces/{namespace}/pods"
    policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    made: list[str] = []

    def make(collection: str, document: dict[str, Any]) -> None:
        # The path is recorded before the request is sent, because the request may succeed even if its answer is lost.
        made.append(f"{collection}/{document['metadata']['name']}")
        client.request("POST", collection, document)

    def wait(part: str, observe: Callable[[dict[str, Any]], Any]) -> Any:
        """Wait until `observe` returns a value other than None for the status of a pod, and return that value."""
        while True:
            if interruption.requested:
                raise LocalError("interrupted", ExitCode.INTERRUPTED)
            status = client.request("GET", f"{pods}/{probe_objects.probe_name(suffix, part)}").get("status", {})
            value = observe(status)
            if value is not None:
                return value
            if status.get("phase") in ("Failed", "Succeeded"):
                raise _GivenUpError(f"its pod {part} ended early: {_reason(status)}")
            if time.monotonic() > deadline:
                raise _GivenUpError(f"its pod {part} was not done after {seconds} s: {_reason(status)}")
            interruption.pause(_POLL_SECONDS)

    def probe() -> NetworkProbe:
        make(pods, probe_objects.listener(suffix, profile, seconds))
        address = wait("listener", _address)
        for policy in probe_objects.policies(suffix, profile):
            make(policies, policy)
        make(pods, probe_objects.asker(suffix, profile, seconds, address))
        reached, let_in, let_out, node, resolved = wait("asker", _report)
        return NetworkProbe(
            ingress_denied=not let_in, egress_denied=not let_out, allowed_reached=reached, node_denied=not node, resolved=resolved
        )

    try:
        return probe()
    except (RequestError, _GivenUpError) as error:
        return UnknownFact(f"the network probe could not be done: {error}")
    finally:
        left = []
        for path in reversed(made):
            try:
                client.request("DELETE", path, DELETE_NOW)
            except RequestError as error:
                if error.status != 404:
                    left.append(f"{path} ({error})")
        if left:
            raise LocalError(f"delete what the network probe has left: {'; '.join(left)}", ExitCode.FAILED)


def _address(status: dict[str, Any]) -> str | None:
    running = any("running" in container.get("state", {}) for container in status.get("containerStatuses", []))
    return status.get("podIP") if running else None


def _report(status: dict[str, Any]) -> list[bool] | None:
    """Return the report of the asking pod, or None while that pod has not ended."""
    for container in status.get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated")
        if ended is None:
            continue
        try:
            answers = json.loads(ended.get("message", ""))
        except ValueError:
            answers = None
        if not (isinstance(answers, list) and len(answers) == _ANSWERS and all(isinstance(each, bool) for each in answers)):
            raise _GivenUpError(f"its container {container.get('name')} exited with {ended.get('exitCode')} and no report")
        return answers
    return None


def _reason(status: dict[str, Any]) -> str:
    """Explain, from a pod's status, why the pod is not running."""
    states = [state for container in status.get("containerStatuses", []) for state in container.get("state", {}).values()]
    conditions = [condition for condition in status.get("conditions", []) if condition.get("status") != "True"]
    for state in (status, *states, *conditions):
        if state.get("message"):
            return f"{state.get('reason', 'no reason')}: {state['message'][:300]}"
    return next((state["reason"] for state in (status, *states) if state.get("reason")), f"its phase is {status.get('phase')}")
