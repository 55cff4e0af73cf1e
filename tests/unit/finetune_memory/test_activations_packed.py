"""The fullest moment of a pass over a base of 4 bits, packed by bitsandbytes and trained by the trainer, as it is predicted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_trainer.model import sharded
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.ranks.gang import Gang
from tests.support.memory_cases import MemoryCase, batch_of, config_of, predicted_peak
from tests.support.memory_tracking import StorageTracker
from tests.support.tiny_model import write_tokenizer

CPU = torch.device("cpu")
TOLERANCE = 0.03


def measured_peak(case: MemoryCase, directory: Path) -> int:
    """Beside weights, scales and buffers."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.config), dtype=torch.bfloat16).save_pretrained(directory)
    write_tokenizer(directory)
    objective = NextToken()
    trained = sharded.build(case.plan, directory, Gang(0, 1, 0, CPU, None), objective)
    model: Any = trained.module
    weights = [each for each in model.parameters() if getattr(each, "quant_state", None) is not None]
    assert len(weights) == 7 * 4
    with StorageTracker([*model.parameters(), *model.buffers(), *(each.quant_state.absmax for each in weights)]) as tracker:
        torch.autograd.backward(objective.weighted_loss(model, batch_of(case), 1.0, CPU, trained.autocast))
    return tracker.peak


@pytest.mark.parametrize("again", ["None", "Selective", "Full"])
@pytest.mark.parametrize(("lora", "is_fused"), [({}, False), ({}, True), ({"loraDropout": "0.1"}, True)], ids=str)
def test_the_peak_is_as_predicted(tmp_path: Path, lora: dict[str, str], is_fused: bool, again: str) -> None:
    spec = {"method": {"type": "QLoRA", "lora": {"r": 8, **lora}}, "training": {"activationCheckpointing": again}}
    case = replace(MemoryCase("QLoRA", config_of("llama"), spec), is_fused=is_fused)
    assert predicted_peak(case) == pytest.approx(measured_peak(case, tmp_path), rel=TOLERANCE)
