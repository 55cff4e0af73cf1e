"""The optimizer steps again, one tensor at a time, with torch's plain optimizers and the gradients that the trainer's got.

Moments are float32 here, whatever the parameter is held in: a run whose own moments vanish in 16 bits goes elsewhere.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from finetune_job.api.training import OptimizerName
from finetune_job.plan.run_plan import RunPlan
from tests.sweep import expected

Tensors = dict[str, torch.Tensor]


def replayed(model: Any, plan: RunPlan, first: Mapping[str, torch.Tensor], gradients: list[Tensors]) -> Tensors:
    """Parameters after all steps. Weight decay goes to what transformers' Trainer decays, but for normalisation weights.

    The Trainer means to leave these out, and knows them by torch's class or by their usual names, of which Mamba's is none.
    """
    training = plan.training
    normalised = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
        for name, _ in module.named_parameters(recurse=False)
    }
    decaying = set(Trainer.get_decay_parameter_names(None, model)) - normalised  # type: ignore[arg-type]
    after = {}
    for name, value in first.items():
        parameter = torch.nn.Parameter(value.float())
        decay = training.weight_decay if name in decaying else 0.0
        ratio = plan.method.lora.lora_plus_ratio if plan.method.lora is not None else None
        scale = ratio if ratio is not None and ".lora_B." in name else 1.0
        optimizer = _optimizer(parameter, plan, decay)
        for step, found in enumerate(gradients):
            if name not in found:
                continue
            rate = scale * expected.rate(
                step,
                len(gradients),
                peak=training.learning_rate,
                schedule=training.scheduler.value,
                warmup=training.warmup_ratio,
                least=training.min_learning_rate_ratio,
                decay=training.decay_ratio,
            )
            optimizer.param_groups[0]["lr"] = rate
            parameter.grad = found[name].float()
            if training.optimizer is OptimizerName.SGD:
                with torch.no_grad():
                    parameter.mul_(1 - rate * decay)
            optimizer.step()
            with torch.no_grad():
                parameter.copy_(parameter.to(value.dtype))
        after[name] = parameter.detach().to(value.dtype)
    return after


def _optimizer(parameter: torch.nn.Parameter, plan: RunPlan, decay: float) -> torch.optim.Optimizer:
    training = plan.training
    settings: dict[str, Any] = {"lr": training.learning_rate, "foreach": False}
    if training.optimizer is OptimizerName.SGD:
        return torch.optim.SGD([parameter], momentum=training.momentum, **settings)
    settings |= {"betas": training.adam_betas, "eps": training.adam_epsilon, "weight_decay": decay}
    if training.optimizer is OptimizerName.RADAM:
        return torch.optim.RAdam([parameter], decoupled_weight_decay=True, **settings)
    return torch.optim.AdamW([parameter], fused=False, **settings)
