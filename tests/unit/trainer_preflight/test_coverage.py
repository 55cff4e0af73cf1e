"""Experts that all-linear does not reach."""

import torch
from torch import nn
from transformers import PreTrainedConfig

from finetune_trainer.preflight.coverage import check_coverage
from tests.unit.trainer_preflight.test_module_names import lora


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(4, 8, 8), requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig()
        self.experts = Experts()
        self.head = nn.Linear(8, 8, bias=False).requires_grad_(False)


def test_experts_that_are_no_linear_layers_are_told_of() -> None:
    (finding,) = check_coverage(Model(), lora())
    assert (finding.rule, finding.severity) == ("experts-without-adapter", "warning")
    assert "80 % of the model's weights" in finding.message
    assert "targetParameters: [experts.down_proj]" in finding.fix


def test_named_parameters_or_modules_are_what_was_meant() -> None:
    assert check_coverage(Model(), lora(target_parameters=("experts.down_proj",))) == []
    assert check_coverage(Model(), lora(target_modules=("head",))) == []
