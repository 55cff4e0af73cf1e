"""The claims that a job names, and the workspace claim that is created from its template."""

from __future__ import annotations

from typing import Any

from finetune_job.api.base import ClaimPath, parse_destination, parse_source
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.output import RetainPolicy, VolumeClaimTemplate
from finetune_job.names import workspace_claim_name
from finetune_job.plan.inputs import named_sources
from finetune_operator.children.frozen_run import Owner, metadata


def workspace_claim_of(spec: FineTuneJobSpec, job_name: str) -> str:
    """Name of the claim that holds the workspace, whether named by the job or created from its template."""
    return spec.workspace.claim_name or workspace_claim_name(job_name)


def claims_named_by(spec: FineTuneJobSpec, job_name: str) -> dict[str, str]:
    """All claims that the job's pods mount, each with the first field that names it."""
    sources = [(f"spec.{named.field}", parse_source(named.source)) for named in named_sources(spec)]
    fields = [(field, source.claim) for field, source in sources if isinstance(source, ClaimPath)]
    results = parse_destination(spec.output.destination)
    if isinstance(results, ClaimPath):
        fields.append(("spec.output.destination", results.claim))
    from_template = spec.workspace.claim_name is None
    field = "spec.workspace.volumeClaimTemplate" if from_template else "spec.workspace.claimName"
    fields.append((field, workspace_claim_of(spec, job_name)))
    claims: dict[str, str] = {}
    for name_of_field, claim in fields:
        claims.setdefault(claim, name_of_field)
    return claims


def workspace_claim(
    owner: Owner, template: VolumeClaimTemplate, retain: RetainPolicy, profile_storage_class: str | None
) -> dict[str, Any]:
    """Build the workspace claim from the job's template.

    The job owns the claim only with `retain: Delete`: an owned claim, with its checkpoints, is deleted with its owner.
    """
    storage_class = template.storage_class_name or profile_storage_class
    spec: dict[str, Any] = {"accessModes": [str(template.access_mode)], "resources": {"requests": {"storage": template.storage}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    name = workspace_claim_name(owner.name)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(owner, name, owned=retain is RetainPolicy.DELETE),
        "spec": spec,
    }
