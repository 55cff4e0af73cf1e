"""What each rank does for a case, stage by stage."""

import copy
from pathlib import Path
from typing import Any

from tests.pitfalls.lab.build import adapted, inner, load_base, peft_model_from, sharded, with_checkpointing
from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.gather import units, whole_gradients, whole_parameters, whole_state
from tests.pitfalls.lab.models import VOCABULARY
from tests.pitfalls.lab.ranks import enter

LENGTH = 16
SEQUENCES_PER_RANK = 2
RATE = 1e-2


def work(rank: int, case: Case, sequences: int, scratch: str) -> dict[str, Any]:
    """The case's stages on this rank. `sequences`: of the global batch. `scratch`: a directory that all ranks share.

    Leaves in it, from the first rank: `gradients` and `trained` (safetensors), `adapter/`.
    """
    return _stages(rank, case, _batch(rank, case, sequences), Path(scratch))


def _batch(rank: int, case: Case, sequences: int) -> Any:
    import torch

    tokens = torch.randint(3, VOCABULARY, (sequences, LENGTH), generator=torch.Generator().manual_seed(5))
    share = sequences // case.world_size
    return tokens[rank * share : (rank + 1) * share]


def _stages(rank: int, case: Case, tokens: Any, place: Path) -> dict[str, Any]:
    import torch

    model, names = _built(case)
    found: dict[str, Any] = {"units": units(model), "trained": tuple(names)}
    if not case.reaches("forward"):
        return found
    if case.evaluate_first:
        enter("forward")
        model.eval()
        with torch.no_grad():
            model(input_ids=tokens)
        model.train()
    losses = [_loss(case, model, tokens)]
    if not case.reaches("backward"):
        return found
    wanted = set(names)
    gradients = whole_gradients(case, model, wanted)
    enter("step")
    _write(rank, place / "gradients", {name: value for name, value in gradients.items() if value is not None})
    if case.reaches("step"):
        optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=RATE)
        for _ in range(case.steps):
            optimizer.step()
            optimizer.zero_grad()
            losses.append(_loss(case, model, tokens))
            enter("step")
        _write(rank, place / "trained", whole_parameters(case, model, wanted))
    found["losses"] = tuple(losses)
    if case.reaches("save"):
        enter("save")
        _save(rank, case, model, place / "adapter")
    if case.reaches("resume"):
        enter("resume")
        found["resume_error"] = _resumed(case, model, optimizer, tokens, wanted)
    if case.reaches("merge"):
        enter("merge")
        found |= _merged(rank, case, model, tokens, place / "adapter")
    return found


def _built(case: Case) -> tuple[Any, list[str]]:
    """The model ready to train, and the names of what is trained."""
    enter("load")
    model = load_base(case)
    if case.attach_after_wrapping:
        enter("shard")
        model = sharded(case, model)
        enter("adapt")
        model = adapted(case, model)
        return model, [name for name, value in model.named_parameters() if value.requires_grad]
    enter("adapt")
    model = with_checkpointing(case, adapted(case, model))
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    enter("shard")
    return sharded(case, model), names


def _loss(case: Case, model: Any, tokens: Any) -> float:
    """Forward and backward."""
    import torch

    enter("forward")
    with torch.autocast("cpu", dtype=getattr(torch, case.compute_autocast or "bfloat16"), enabled=bool(case.compute_autocast)):
        loss = model(input_ids=tokens, labels=tokens).loss
    if case.reaches("backward"):
        enter("backward")
        loss.backward()
    return float(loss.detach())


def _write(rank: int, path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    if rank == 0:
        save_file({name: value.detach().float().contiguous() for name, value in tensors.items()}, path)


def _save(rank: int, case: Case, model: Any, place: Path) -> None:
    from torch import distributed

    if case.save == "naive":
        inner(case, model).save_pretrained(place if rank == 0 else place.with_name(f"rank-{rank}"))
    else:
        state = whole_state(case, model)
        if rank == 0:
            inner(case, model).save_pretrained(place, state_dict=state)
    distributed.barrier()


def _resumed(case: Case, model: Any, optimizer: Any, tokens: Any, names: set[str]) -> float:
    """Torch's own way: whole state of model and optimizer out, into a fresh model, and a step on both sides."""
    import torch

    fresh, _ = _built(case)
    fresh_optimizer = torch.optim.AdamW([value for value in fresh.parameters() if value.requires_grad], lr=RATE)
    enter("resume")
    (_flat_state if case.version == 1 else _state)(model, optimizer, fresh, fresh_optimizer)
    ends = []
    for one, its_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        its_optimizer.zero_grad()
        _loss(case, one, tokens)
        enter("resume")
        its_optimizer.step()
        ends.append(whole_parameters(case, one, names))
    return max(float((ends[0][name].float() - ends[1][name].float()).abs().max()) for name in names)


def _state(model: Any, optimizer: Any, fresh: Any, fresh_optimizer: Any) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    # Copies, as a file would give: loading takes whole tensors as they are, and both optimizers would work on the same moments.
    model_state, optimizer_state = copy.deepcopy((model_state, optimizer_state))
    set_state_dict(fresh, fresh_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)


def _flat_state(model: Any, optimizer: Any, fresh: Any, fresh_optimizer: Any) -> None:
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel, StateDictType

    settings = (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )
    with FullyShardedDataParallel.state_dict_type(model, *settings):
        model_state = model.state_dict()
        optimizer_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(fresh, *settings):
        fresh.load_state_dict(model_state)
        found = FullyShardedDataParallel.optim_state_dict_to_load(fresh, fresh_optimizer, optimizer_state)
        fresh_optimizer.load_state_dict(found)


def _merged(rank: int, case: Case, model: Any, tokens: Any, adapter: Path) -> dict[str, Any]:
    import torch
    from torch import distributed

    with torch.no_grad():
        if case.merge == "sharded":
            model.eval()
            apart = model(input_ids=tokens).logits
            together = inner(case, model).merge_and_unload()(input_ids=tokens).logits
            return {"merge_error": float((together - apart).abs().max())}
        found = {}
        if rank == 0:
            whole = peft_model_from(case, adapter)
            apart = whole(input_ids=tokens).logits
            with whole.disable_adapter():
                base = whole(input_ids=tokens).logits
            together = whole.merge_and_unload()(input_ids=tokens).logits
            found = {"merge_error": float((together - apart).abs().max()), "merge_effect": float((apart - base).abs().max())}
        distributed.barrier()
        return found
