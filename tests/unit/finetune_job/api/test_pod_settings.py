"""`pods` of a profile: Kubernetes' own forms, bounded, and nothing that the operator itself sets."""

from typing import Any

import pytest
from pydantic import ValidationError

from finetune_job.api.profile import FineTuneProfileSpec
from tests.support.cases import table


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


@pytest.mark.parametrize(("settings", "said"), table(__file__, "test_what_could_not_work_is_refused_with_the_fix"))
def test_what_could_not_work_is_refused_with_the_fix(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        profile(**settings)
