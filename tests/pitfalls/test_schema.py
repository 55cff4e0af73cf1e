"""Settings that other tools take late and wrongly: here no object can hold them."""

from typing import Any

import pytest
from pydantic import ValidationError

from finetune_job.api.job import FineTuneJobSpec
from tests.unit.finetune_job.rules.manifests import manifest


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"parallelism.fsdp.reshardAfterForward": "FULL_SHARD"}, {"parallelism.fsdp.reshardAfterForward": True}),
        (
            {"parallelism.fsdp.autoWrapPolicy": "transformer_based_wrap"},
            {"parallelism.fsdp.autoWrapPolicy": "TRANSFORMER_BASED_WRAP"},
        ),
        ({"training.optimizer": "Muon"}, {"training.optimizer": "AdamW"}),
        ({"training.optimizer": "GaLore"}, {"training.optimizer": "SGD"}),
        ({"method.lora.initLoraWeights": "normal"}, {"method.lora.initLoraWeights": "gaussian"}),
        ({"parallelism.fsdp.minNumParams": 0}, {"parallelism.fsdp.minNumParams": 1}),
        ({"parallelism.fsdp.forwardPrefetch": False}, {}),
    ],
)
def test_no_job_can_write_them_down(wrong: dict[str, Any], right: dict[str, Any]):
    with pytest.raises(ValidationError):
        FineTuneJobSpec.model_validate(manifest(wrong))
    assert FineTuneJobSpec.model_validate(manifest(right))
