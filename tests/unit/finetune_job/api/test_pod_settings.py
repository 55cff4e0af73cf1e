"""`pods` of a profile: Kubernetes' own forms, bounded, and nothing that the operator itself sets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from finetune_job.api.profile import FineTuneProfileSpec


def profile(**settings: Any) -> FineTuneProfileSpec:
    return FineTuneProfileSpec.model_validate({"trainerImage": "trainer", "gpu": {}, "pods": {"train": settings}})


@pytest.mark.parametrize(
    "settings",
    [
        {"tolerations": [{"operator": "Exists"}]},
        {"tolerations": [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 0}]},
        {"labels": {"team": "", "example.com/tier": "gold"}},
        {"annotations": {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"}},
        {"extraResources": {"rdma/hca": "1", "hugepages-2Mi": "4Gi", "ephemeral-storage": "10Gi"}},
        {"env": [{"name": "GLOO_SOCKET_IFNAME", "value": "eth0"}, {"name": "FI_PROVIDER", "value": "efa"}]},
        {"resourceClaims": [{"name": "gpu", "resourceClaimName": "shared"}]},
    ],
)
def test_what_kubernetes_takes_is_taken(settings: dict[str, Any]) -> None:
    profile(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tolerations": [{"value": "a"}]}, "write operator: Exists, or name the key"),
        ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "Exists has no value"),
        ({"tolerations": [{"key": "a", "tolerationSeconds": 5}]}, "belongs to effect NoExecute"),
        ({"tolerations": [{"key": "a", "seconds": 5}]}, "Extra inputs"),
        ({"labels": {"finetune.dev/role": "train"}}, "set by the operator"),
        ({"labels": {"app.kubernetes.io/managed-by": "me"}}, "set by the operator"),
        ({"labels": {"batch.kubernetes.io/job-name": "x"}}, "set by the operator"),
        ({"annotations": {"batch.kubernetes.io/job-completion-index": "7"}}, "set by the operator"),
        ({"labels": {"not a name": "x"}}, "is not a name"),
        ({"labels": {"a": "b" * 64}}, "at most 63"),
        ({"extraResources": {"memory": "1Gi"}}, "set by `resources`"),
        ({"extraResources": {"nvidia.com/gpu": "8"}}, "set by gpu.resourceName"),
        ({"env": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}, "should match pattern"),
        ({"env": [{"name": "TORCH_NCCL_ASYNC_ERROR_HANDLING", "value": "0"}]}, "should match pattern"),
        ({"env": [{"name": "NCCL_DEBUG", "value": "A"}, {"name": "NCCL_DEBUG", "value": "B"}]}, "named twice"),
        ({"resourceClaims": [{"name": "a"}]}, "exactly one of"),
        ({"affinity": {"nodeAfinity": {}}}, "Extra inputs"),
        ({"queueName": "No Name"}, "should match pattern"),
    ],
)
def test_what_could_not_work_is_refused_with_the_fix(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        profile(**settings)
