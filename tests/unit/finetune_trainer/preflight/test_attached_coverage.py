"""Experts that all-linear does not reach."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from finetune_trainer.preflight.attached import check_coverage
from finetune_trainer.preflight.model_inspection import AttachedModel, ModelInspection
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.preflight.test_module_names import lora


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


def trained(**changes: Any) -> ModelInspection:
    plan = plan_of(tiny_spec())
    method = plan.method.model_copy(update={"lora": lora(**changes)})
    seen = ModelInspection(plan.model_copy(update={"method": method}), Path("model"))
    seen.attached = AttachedModel(Model(), {}, ())
    return seen


def test_experts_that_are_no_linear_layers_are_told_of() -> None:
    (finding,) = check_coverage(trained())
    assert (finding.rule, finding.severity) == ("experts-without-adapter", "warning")
    assert "80 % of the model's weights" in finding.message
    assert "targetParameters: [experts.down_proj]" in finding.fix


def test_named_parameters_or_modules_are_what_was_meant() -> None:
    assert check_coverage(trained(target_parameters=("experts.down_proj",))) == []
    assert check_coverage(trained(target_modules=("head",))) == []
