"""Whole tensors of a sharded model, by the names that they had before sharding. All ranks call these together."""

from typing import Any

from tests.pitfalls.lab.case import Case

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """A name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def units(model: Any) -> dict[str, str]:
    """Name and class of each FSDP unit."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            found[plain_name(name)] = type(module.module).__name__
        elif isinstance(module, FSDPModule):
            found[plain_name(name)] = type(module).__name__.removeprefix("FSDP")
    return found


def whole_parameters(case: Case, model: Any, names: set[str]) -> dict[str, Any]:
    """Values of the parameters of these names."""
    if case.version != 1:
        return {name: _whole(value.detach()) for name, value in _named(case, model) if name in names}
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: value.detach().clone() for name, value in _named(case, model) if name in names}


def whole_gradients(case: Case, model: Any, names: set[str]) -> dict[str, Any]:
    """Gradients of the parameters of these names; zeros or None where there are none."""
    if case.version != 1:
        found = {name: value.grad for name, value in _named(case, model) if name in names}
        return {name: None if gradient is None else _whole(gradient) for name, gradient in found.items()}
    from torch.distributed.fsdp import FullyShardedDataParallel

    if case.use_orig_params:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
            return {
                name: None if value.grad is None else value.grad.detach().clone()
                for name, value in _named(case, model)
                if name in names
            }
    # Flat parameters show whole weights but no whole gradients: let the gradients stand for the weights for a moment.
    import torch

    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle is not None]
    kept = [handle.flat_param.detach().clone() for handle in handles]
    with torch.no_grad():
        for handle in handles:
            gradient = handle.flat_param.grad
            if gradient is not None and gradient.shape != handle.flat_param.shape:
                raise RuntimeError(
                    f"a gradient of {gradient.numel()} values for a shard of {handle.flat_param.numel()}: it was never reduced"
                )
            handle.flat_param.copy_(torch.zeros_like(handle.flat_param) if gradient is None else gradient)
        found = whole_parameters(case, model, names)
        for handle, values in zip(handles, kept, strict=True):
            handle.flat_param.copy_(values)
    return found


def whole_state(case: Case, model: Any) -> dict[str, Any] | None:
    """The state dict as `accelerator.get_state_dict` gathers it; None where nothing is sharded."""
    if case.version == 1:
        from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

        # Offloading to the CPU from the CPU can end the process.
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            return dict(model.state_dict())
    if case.version == 2:
        return {name: _whole(value) for name, value in model.state_dict().items()}
    return None


def _named(case: Case, model: Any) -> list[tuple[str, Any]]:
    start = "module." if case.version == 0 else ""
    return [(plain_name(name.removeprefix(start)), value) for name, value in model.named_parameters()]


def _whole(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value.clone()
