"""On what the ranks of a job compute, in words."""

from typing import Any

import pytest

from finetune_job.device import device_text, product_of
from tests.support.builders import a_job

H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


@pytest.mark.parametrize(
    ("profile", "product"),
    [
        ({"gpu": {"product": "NVIDIA L4"}, "node_selector": H100}, "NVIDIA L4"),
        ({"gpu": {}, "node_selector": H100}, "NVIDIA-H100-80GB-HBM3"),
        ({"gpu": {}, "pods": {"train": {"nodeSelector": H100}}}, "NVIDIA-H100-80GB-HBM3"),
        ({"gpu": {}}, None),
        ({"gpu": None, "node_selector": H100}, None),
    ],
)
def test_a_device_is_named_by_the_profile_or_by_the_label_of_its_nodes(profile: dict[str, Any], product: str | None) -> None:
    plan = a_job().with_profile(**profile).plan()
    assert product_of(plan) == product
    assert device_text(plan).endswith(
        f", each on one nvidia.com/gpu of 80Gi, {product} (profile default)"
        if product
        else ("of 80Gi (profile default)" if profile["gpu"] is not None else "on CPU: profile default names no GPU")
    )
