"""Adapters on stacked weights of experts: what PEFT does not take for them, and what it does not look at."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import findings
from tests.pitfalls.one_process import mixtral, tokens

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(**settings: Any) -> torch.nn.Module:
    named = {"target_modules": [], "target_parameters": EXPERTS}
    return get_peft_model(mixtral(), LoraConfig(task_type="CAUSAL_LM", r=4, **{**named, **settings}))


def layers_with_adapters(model: torch.nn.Module) -> set[str]:
    return {
        name.split(".layers.")[1].split(".")[0] for name, p in model.named_parameters() if p.requires_grad and "experts" in name
    }


@pytest.mark.parametrize(
    ("peft", "spec", "error"),
    [
        ({"lora_dropout": 0.1}, {"type": "LoRA", "lora": {"loraDropout": "0.1"}}, "does not work with lora_dropout != 0"),
        ({"use_dora": True}, {"type": "DoRA", "lora": {}}, "does not work with use_dora=True"),
        (
            {"init_lora_weights": "orthogonal"},
            {"type": "LoRA", "lora": {"initLoraWeights": "orthogonal"}},
            "no attribute 'weight'",
        ),
        ({"init_lora_weights": "pissa"}, {"type": "LoRA", "lora": {"initLoraWeights": "pissa"}}, "no attribute 'weight'"),
    ],
)
def test_settings_that_parameters_do_not_take(peft: dict[str, Any], spec: dict[str, Any], error: str):
    rule = "target-parameters-conflict"
    with pytest.raises((ValueError, AttributeError), match=error):
        adapted(**peft)
    assert rule in findings(type=spec["type"], lora={"targetParameters": EXPERTS, **spec["lora"]})
    loss = adapted()(input_ids=tokens(), labels=tokens()).loss
    assert torch.isfinite(loss)
    assert rule not in findings(type="LoRA", lora={"targetParameters": EXPERTS})


def test_parameters_are_adapted_in_all_layers():
    rule = "target-parameters-all-layers"
    assert layers_with_adapters(adapted(target_modules=["q_proj"], layers_to_transform=[0])) == {"0", "1"}
    assert rule in findings(
        type="LoRA", lora={"targetParameters": EXPERTS, "targetModules": ["q_proj"], "layersToTransform": [0]}
    )
    assert layers_with_adapters(adapted(exclude_modules=["experts"])) == {"0", "1"}
    assert rule in findings(type="LoRA", lora={"targetParameters": EXPERTS, "excludeModules": ["experts"]})
    named = ["model.layers.0.mlp.experts.down_proj"]
    assert layers_with_adapters(adapted(target_parameters=named)) == {"0"}
    assert rule not in findings(type="LoRA", lora={"targetParameters": named})


def shard(rank: int, version: int) -> float:
    model = adapted()
    if version == 1:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return float(loss.detach())


def test_parameters_under_fsdp_1():
    rule = "fsdp1-target-parameters"
    (error, *_) = [result.error for result in run_ranks(shard, 1) if result.failed]
    assert "modified inplace" in error
    assert rule in findings({"version": 1}, type="LoRA", lora={"targetParameters": EXPERTS})
    assert not any(result.failed for result in run_ranks(shard, 2))
    assert rule not in findings({"version": 2}, type="LoRA", lora={"targetParameters": EXPERTS})
