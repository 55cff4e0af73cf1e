"""FSDP 1: FullyShardedDataParallel with one of its wrap policies."""

from __future__ import annotations

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy

from finetune_job.plan.run_plan import FsdpPlan
from finetune_trainer.model.dtypes import ModelDtypes
from finetune_trainer.model.invariants import check_flat_units
from finetune_trainer.model.wrap_plan import unit_names


def shard(model: nn.Module, fsdp: FsdpPlan, dtypes: ModelDtypes, device: torch.device) -> nn.Module:
    """A sharded wrapper of `model`. Raises ConfigError where a unit's parameters cannot lie in one flat parameter."""
    names = unit_names(model, fsdp)
    check_flat_units(model, names, fsdp)
    modules = dict(model.named_modules())
    units = {id(modules[name]) for name in names}
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
        mixed_precision=MixedPrecision(param_dtype=dtypes.param, reduce_dtype=dtypes.reduce),
        cpu_offload=CPUOffload(offload_params=fsdp.offload_params),
        device_id=device,
        # torch broadcasts only from accelerators; nothing is lost, because all ranks load the same files with the same seed.
        sync_module_states=bool(fsdp.sync_module_states) and device.type != "cpu",
        use_orig_params=bool(fsdp.use_orig_params),
    )
    if dtypes.param is not None:
        _leave_inputs_to_units(sharded)
    return sharded


def _leave_inputs_to_units(model: nn.Module) -> None:
    """Units of adapters cast what they are given.

    PEFT would cast it before, to the type of the weight that it sees there: the stored one until the unit first gathers its weight,
    and the computation's ever after, so that the first pass after a restart would round what dropout leaves in another type.
    """
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and any(
            isinstance(module, FullyShardedDataParallel)
            for name in layer.adapter_layer_names
            for module in (getattr(layer, name).modules() if isinstance(getattr(layer, name), nn.Module) else ())
        ):
            layer.cast_input_dtype_enabled = False
