"""FSDP 2: `fully_shard` on each unit and the root."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from finetune_job.plan.run_plan import FsdpPlan
from finetune_trainer.model.dtypes import ModelDtypes
from finetune_trainer.model.wrap_plan import unit_names


def shard(model: nn.Module, fsdp: FsdpPlan, dtypes: ModelDtypes, mesh: DeviceMesh) -> nn.Module:
    """Shard `model` in place over `mesh`; the model itself."""
    modules = dict(model.named_modules())
    units = [modules[name] for name in unit_names(model, fsdp)]
    for module in [*units, model]:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=fsdp.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtypes.param, reduce_dtype=dtypes.reduce),
            offload_policy=CPUOffloadPolicy() if fsdp.offload_params else OffloadPolicy(),
        )
    return model
