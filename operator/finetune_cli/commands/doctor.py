"""`finetune doctor`: checks whether a cluster has what FineTuneJobs need."""

from __future__ import annotations

from typing import Any

from finetune_cli.checks.cluster import Check, ClusterFacts, NetworkProbe, UnknownFact, exit_code, judge
from finetune_cli.cluster.client import ClusterClient
from finetune_cli.cluster.network_probe import probe_network
from finetune_cli.cluster.read_facts import read_facts
from finetune_cli.local.launch import Interruption
from finetune_cli.render.verdicts import labelled
from finetune_job.api.profile import FineTuneProfileSpec


def examine(*, context: str | None, namespace: str, profile: str, probe: bool, seconds: int) -> tuple[ClusterFacts, list[Check]]:
    """Read and judge the facts of a cluster. Raises LocalError."""
    client = ClusterClient(context)
    with Interruption(stopping="the two pods and their policies are deleted") as interruption:

        def probed(profile_spec: FineTuneProfileSpec | None) -> NetworkProbe | UnknownFact:
            if profile_spec is None:
                return UnknownFact("the network probe runs the image of the profile, which could not be read")
            return probe_network(client, namespace, profile_spec, seconds, interruption)

        facts = read_facts(client, namespace, profile, probed if probe else None)
    return facts, judge(facts)


def doctor_document(facts: ClusterFacts, checks: list[Check]) -> dict[str, Any]:
    """Return the answer as plain data."""
    return {
        "namespace": facts.namespace,
        "profile": facts.profile_name,
        "healthy": exit_code(checks) == 0,
        "checks": [
            {"id": check.id.value, "outcome": check.outcome.value, "message": check.message, "fix": check.fix} for check in checks
        ],
    }


def doctor_text(checks: list[Check]) -> str:
    """Return the answer as text."""
    lines = []
    for check in checks:
        lines.append(f"{check.outcome:8} {check.id}: {check.message}")
        if check.fix:
            lines.append(labelled("fix", check.fix))
    return "\n".join(lines) + "\n"
