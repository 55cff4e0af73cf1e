"""Settings that one rank takes and two cannot hold to: method-setting-on-one-rank-only."""

from typing import Any

import torch

from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.one_process import judged, llama, peft_config, tokens

RULE = "method-setting-on-one-rank-only"


def train(rank: int, method: str, settings: dict[str, Any], world_size: int, version: int) -> float | list[float]:
    """Two steps on the same global batch; the trained values of this rank, or of the whole under FSDP 2."""
    from peft import get_peft_model

    model = get_peft_model(llama(), peft_config(method, settings)).train()
    if world_size > 1 and version == 2:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif world_size > 1:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    held = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(held, lr=0.1, eps=1e-3)
    batches = tokens().split(1)
    mine = [batches[rank]] if world_size > 1 else batches
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        for batch in mine:
            (model(input_ids=batch, labels=batch).loss / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [float(value.full_tensor().norm() if hasattr(value, "full_tensor") else value.norm()) for value in held]


def found(method: str, settings: dict[str, Any], processes: int) -> bool:
    changes = {"method.type": method, "method.settings": settings, "parallelism.processesPerNode": processes}
    return RULE in {finding.rule for finding in judged(changes)}


def test_modules_dropped_on_one_rank_only():
    wrong, right = {"r": 4, "moduleDropout": "0.5"}, {"r": 4, "rankDropout": "0.1"}
    assert any(result.failed for result in run_ranks(train, "LoHa", wrong, 2, 2))
    assert found("LoHa", wrong, 2)
    assert not any(result.failed for result in run_ranks(train, "LoHa", right, 2, 2))
    assert not found("LoHa", right, 2)
    assert not found("LoHa", wrong, 1)


def test_parameters_that_are_projected_in_the_forward_pass():
    fitting = {"r": 0, "oftBlockSize": 8}
    wrong = {**fitting, "coft": True, "eps": "0.1"}
    assert any("modified inplace" in result.error for result in run_ranks(train, "OFT", wrong, 2, 1) if result.failed)
    for settings, agree in ((wrong, False), (fitting, True)):
        alone, pair = train(0, "OFT", settings, 1, 2), run_ranks(train, "OFT", settings, 2, 2)
        values = [result.value for result in pair]
        assert bool(torch.allclose(torch.tensor(alone), torch.tensor(values[0]), rtol=1e-3)) is agree
        assert found("OFT", settings, 2) is not agree
