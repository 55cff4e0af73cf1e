"""Shards a model with version 1 or 2 of FSDP, and sums gradients over ranks after each micro-step or once per step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from finetune_job.plan.run_plan import FsdpPlan
from finetune_trainer.model.dtypes import ModelDtypes
from finetune_trainer.model.invariants import check_flat_units
from finetune_trainer.model.wrap_plan import unit_names


def shard_with_fsdp1(model: nn.Module, fsdp: FsdpPlan, dtypes: ModelDtypes, device: torch.device) -> nn.Module:
    """Wrap and shard `model`. Raises ConfigError if the parameters of a unit cannot be joined into one flat parameter."""
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
        # torch cannot do this broadcast on CPUs. Nothing is lost, as all ranks load the same files with the same seed.
        sync_module_states=bool(fsdp.sync_module_states) and device.type != "cpu",
        use_orig_params=bool(fsdp.use_orig_params),
    )
    if dtypes.param is not None:
        _leave_inputs_to_units(sharded)
    return sharded


def _leave_inputs_to_units(model: nn.Module) -> None:
    """Stop PEFT from casting the inputs of adapters that are FSDP units, since FSDP casts them.

    PEFT would cast inputs earlier, to the type that the weight has at that moment: the stored type until the unit first gathers
    its weight, then the computation's type. So the first pass after a restart would round the output of dropout differently.
    """
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and any(
            isinstance(module, FullyShardedDataParallel)
            for name in layer.adapter_layer_names
            for module in (getattr(layer, name).modules() if isinstance(getattr(layer, name), nn.Module) else ())
        ):
            layer.cast_input_dtype_enabled = False


def shard_with_fsdp2(
    model: nn.Module, fsdp: FsdpPlan, dtypes: ModelDtypes, mesh: DeviceMesh, whole: Sequence[nn.Parameter] = ()
) -> nn.Module:
    """Shard `model` in place over `mesh` and return it. Each rank keeps all of the parameters in `whole`."""
    for parameter in whole:
        # FSDP moves only parameters that it shards to the device, so these are moved here.
        parameter.data = parameter.data.to(mesh.device_type)
    modules = dict(model.named_modules())
    units = [modules[name] for name in unit_names(model, fsdp)]
    for module in [*units, model]:
        fully_shard(
            module,
            mesh=mesh,
            # If this were unset, torch would use one value for the root and another for the other units.
            reshard_after_forward=fsdp.reshard_after_forward is not False,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtypes.param, reduce_dtype=dtypes.reduce),
            offload_policy=CPUOffloadPolicy() if fsdp.offload_params else OffloadPolicy(),
            ignored_params=set(whole) or None,
        )
    return model


@dataclass(frozen=True)
class Reduction:
    """The schedule for reducing gradients. It is fixed for a run, because all ranks and restarts must sum in the same order."""

    every_micro_step: bool = True
    keeps_gathered: bool = False
    """Whether FSDP 2 keeps parameters gathered between forward and backward."""


_latest: WeakKeyDictionary[FSDPModule, tuple[bool, bool]] = WeakKeyDictionary()
"""Settings that `reducing` last gave each model: whether to reduce gradients, and to free parameters after backward."""


def reducing(model: nn.Module, reduction: Reduction, *, is_last: bool) -> AbstractContextManager[None]:
    """Return a context for one forward and backward pass, after which gradients are reduced only if that is due.

    With `keeps_gathered`, parameters stay gathered until the last pass before an optimizer step, which changes them. So they are
    gathered once per step instead of once per pass.
    """
    is_due = reduction.every_micro_step or is_last
    if isinstance(model, FSDPModule):
        wanted = (is_due, is_last or not reduction.keeps_gathered)
        if _latest.get(model) != wanted:  # each call goes through all modules
            model.set_requires_gradient_sync(wanted[0])
            model.set_reshard_after_backward(wanted[1])
            _latest[model] = wanted
    elif isinstance(model, FullyShardedDataParallel) and not is_due:
        no_sync: AbstractContextManager[None] = model.no_sync()
        return no_sync
    return nullcontext()
