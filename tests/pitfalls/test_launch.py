"""What a launch through other libraries does: Accelerate's settings, optimizers made too early, parameters that FSDP 2
refuses."""

import os
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.one_process import llama, tokens


@pytest.mark.parametrize(
    ("wrong", "right", "text"),
    [
        ({"fsdp_version": 2, "forward_prefetch": False}, {"fsdp_version": 2}, "forward_prefetch is not yet implemented"),
        (
            {"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"},
            {"fsdp_version": 2, "reshard_after_forward": True},
            "invalid truth value",
        ),
        ({"fsdp_version": 2, "activation_checkpointing_offload": True}, {"fsdp_version": 2}, "activation_checkpointing"),
    ],
)
def test_accelerates_settings_of_version_2(wrong: dict[str, Any], right: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        FullyShardedDataParallelPlugin(**wrong)
    assert FullyShardedDataParallelPlugin(**right).fsdp_version == 2


def kind_of_launch(rank: int) -> str:
    from accelerate import Accelerator

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return str(Accelerator(cpu=True, fsdp_plugin=plugin).distributed_type)


def test_accelerate_shards_nothing_on_a_cpu():
    results = run_ranks(kind_of_launch)
    assert [(result.error, result.value) for result in results] == [("", "DistributedType.MULTI_CPU")] * 2


def test_an_optimizer_from_before_the_adapter_updates_nothing():
    base = llama()
    early = torch.optim.SGD(base.parameters(), lr=1.0)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    late = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)
    for optimizer, moves in ((early, False), (late, True)):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        model.zero_grad()
        assert any(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters()) is moves


def shard_odd(rank: int, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(4, 4)
    if kind == "scalar":
        module.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    if kind == "view":
        module.weight = nn.Parameter(torch.ones(4, 8).t()[:4])
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def test_version_2_takes_neither_scalars_nor_views():
    assert any("scalar" in result.error for result in run_ranks(shard_odd, "scalar") if result.failed)
    assert any("contiguous" in result.error for result in run_ranks(shard_odd, "view") if result.failed)
    assert not any(result.failed for result in run_ranks(shard_odd, "plain"))
