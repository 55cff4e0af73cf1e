"""`finetune doctor`: whether a cluster has what FineTuneJobs need, and what is printed of it."""

from __future__ import annotations

from typing import Any

from finetune_cli.checks.cluster import Check, ClusterFacts, NetworkProbe, UnknownFact, exit_code, judge
from finetune_cli.cluster.client import ClusterClient
from finetune_cli.cluster.network_probe import probe_network
from finetune_cli.cluster.read_facts import read_facts
from finetune_cli.local.launch import Interruption
from finetune_cli.render.verdicts import labelled
from finetune_job.api.profile import FineTuneProfileSpec


def examine(
    *, context: str | None, namespace: str, profile: str, image: str | None, probe: bool, seconds: int
) -> tuple[ClusterFacts, list[Check]]:
    """Read the facts of a cluster and judge them. `image` replaces the profile's in the network probe. Raises LocalError."""
    client = ClusterClient(context)
    with Interruption(stopping="the two pods and their policies are deleted") as interruption:

        def probed(profile_spec: FineTuneProfileSpec | None) -> NetworkProbe | UnknownFact:
            if profile_spec is None and image is None:
                return UnknownFact("the network probe needs an image with Python: a readable profile, or --image")
            settings = profile_spec or FineTuneProfileSpec(trainer_image=image or "")
            chosen = settings if image is None else settings.model_copy(update={"trainer_image": image})
            return probe_network(client, namespace, chosen, seconds, interruption)

        facts = read_facts(client, namespace, profile, probed if probe else None)
    return facts, judge(facts)


def doctor_document(facts: ClusterFacts, checks: list[Check]) -> dict[str, Any]:
    """The answer as plain data."""
    return {
        "namespace": facts.namespace,
        "profile": facts.profile_name,
        "healthy": exit_code(checks) == 0,
        "checks": [{"id": one.id.value, "outcome": one.outcome.value, "message": one.message, "fix": one.fix} for one in checks],
    }


def doctor_text(checks: list[Check]) -> str:
    """The answer for a person."""
    lines = []
    for one in checks:
        lines.append(f"{one.outcome:8} {one.id}: {one.message}")
        if one.fix:
            lines.append(labelled("fix", one.fix))
    return "\n".join(lines) + "\n"
