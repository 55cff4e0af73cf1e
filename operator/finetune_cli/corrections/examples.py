"""A field of the API -> a value that is accepted as it is, for those who left it out or wrote what nothing can be made of.

proposals.py shows it where no better value can be concluded from what was written.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from finetune_cli.corrections.wrong_field import inner_model
from finetune_job.names import API_VERSION

_EXAMPLES: dict[str, Any] = {
    "FineTuneJob.apiVersion": API_VERSION,
    "FineTuneProfile.apiVersion": API_VERSION,
    "FineTuneJob.kind": "FineTuneJob",
    "FineTuneProfile.kind": "FineTuneProfile",
    "ObjectMeta.name": "tuned",
    "FineTuneJobSpec.training": {"epochs": 1},
    "FineTuneJobSpec.data": {"source": "pvc://data/train.jsonl"},
    "FineTuneJobSpec.workspace": {"volumeClaimTemplate": {"storage": "100Gi"}},
    "ModelSpec.source": "pvc://models/base",
    "AddedToken.content": "<|tool|>",
    "ValidationData.source": "pvc://data/held-out.jsonl",
    "Dataset.source": "pvc://data/train.jsonl",
    "DataSpec.source": "pvc://data/train.jsonl",
    "OutputSpec.destination": "pvc://models-out/tuned",
    "VolumeClaimTemplate.storage": "100Gi",
    "TrainingSpec.epochs": 1,
    "TrainingSpec.maxSteps": 100,
    "LoraSpec.r": 16,
    "LoraSpec.loraAlpha": 32,
    "WorkspaceSpec.claimName": "workspace",
    "SecretKeyRef.name": "hub-token",
    "SecretRef.name": "bucket-keys",
    "FineTuneProfileSpec.trainerImage": "registry.example.com/finetune-trainer:latest",
    "SecretReference.name": "registry-login",
    "NetworkDestination.cidr": "10.0.0.0/16",
    "CaBundle.configMap": "authorities",
    "PodResourceClaim.name": "gpus",
    "NodeCondition.type": "GpuXidError",
    "LabelRequirement.key": "kubernetes.io/metadata.name",
    "LabelRequirement.operator": "Exists",
    "NetworkVariable.name": "NCCL_DEBUG",
    "NetworkVariable.value": "WARN",
}
"""Of required fields, of those without which a rule refuses the job, and of those whose limits nobody means, by model: values
that are accepted as they are.
"""


def example(model: type[BaseModel], alias: str) -> Any:
    """A value of a required field; of a model, its own required fields. None: nobody can guess one."""
    written = _EXAMPLES.get(f"{model.__name__}.{alias}")
    if written is not None:
        return written
    inner = inner_model(model, alias)
    if inner is None or not any(info.is_required() for info in model.model_fields.values() if info.alias == alias):
        return None
    needed = {
        info.alias or name: example(inner, info.alias or name) for name, info in inner.model_fields.items() if info.is_required()
    }
    return None if None in needed.values() else needed
