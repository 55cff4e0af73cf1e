"""Offloaded parameters lie in pinned memory, which only a GPU driver gives."""

import pytest
import torch

from finetune_job.api.profile import FineTuneProfileSpec
from tests.pitfalls.lab.build import adapted, load_base
from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import findings


def offloaded_loss(rank: int, case: Case, version: int, offload: bool) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy, fully_shard

    model = adapted(case, load_base(case))
    if version == 1:
        model = FullyShardedDataParallel(
            model, cpu_offload=CPUOffload(offload), use_orig_params=True, device_id=torch.device("cpu"), sync_module_states=False
        )
    else:
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), offload_policy=policy)
    tokens = torch.arange(16).reshape(1, 16)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss.detach())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this pitfall is one of machines without a GPU")
@pytest.mark.parametrize("version", [1, 2])
def test_offloading_needs_a_driver(version):
    results = run_ranks(offloaded_loss, Case(), version, True)
    assert "Found no NVIDIA driver" in results[0].error or "accelerator" in results[0].error
    assert not any(result.failed for result in run_ranks(offloaded_loss, Case(), version, False))
    without = FineTuneProfileSpec(trainer_image="trainer")
    assert "offload-without-gpu" in findings({"version": version, "offloadParams": True}, profile=without)
    assert "offload-without-gpu" not in findings({"version": version, "offloadParams": False}, profile=without)
