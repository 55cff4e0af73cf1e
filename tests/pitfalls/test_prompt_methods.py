"""Prompt methods and AdaLoRA, which lean on whole tensors where a rank has a shard; the product refuses them all."""

import pytest

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails, trains
from tests.pitfalls.lab.observe import observe
from tests.pitfalls.lab.ranks import run_ranks


def test_prefix_tuning_cannot_be_checkpointed():
    prefix = Case(method="PREFIX_TUNING", version=0)
    assert not observe(prefix).failed
    fails(Case(method="PREFIX_TUNING", version=0, checkpointing="non-reentrant"), "forward", "RuntimeError")


@pytest.mark.parametrize("method", ["PROMPT_TUNING", "PREFIX_TUNING"])
def test_fsdp_2_cannot_save_a_prompt(method):
    fails(Case(method=method, version=2, until="save"), "save", "got mixed torch.Tensor and DTensor")


def test_adalora_needs_whole_matrices():
    fails(Case(method="ADALORA", version=2), "forward", "RuntimeError: aten.eye")
    fails(Case(method="ADALORA", version=1, use_orig_params=True), "forward", "Error")
    trains(Case(method="ADALORA", version=0))


def test_adalora_needs_a_schedule_that_somebody_calls():
    from peft import AdaLoraConfig

    with pytest.raises(ValueError, match="total_step"):
        AdaLoraConfig(init_r=4, target_r=2)
    with pytest.raises(ValueError, match="tinit"):
        AdaLoraConfig(init_r=4, target_r=2, total_step=10, tinit=5, tfinal=5)


def saved_by_the_first(rank: int, case: Case, directory: str) -> None:
    from torch import distributed

    from tests.pitfalls.lab.build import adapted, inner, load_base, sharded

    model = sharded(case, adapted(case, load_base(case)))
    if rank == 0:
        inner(case, model).save_pretrained(directory)
    distributed.barrier()


def test_saving_a_prompt_on_one_rank_waits_for_ever_under_fsdp_1(tmp_path):
    """The deadline is short: the same ranks are done within a second or two where nothing is sharded."""
    assert not any(
        result.failed for result in run_ranks(saved_by_the_first, Case(method="PROMPT_TUNING", version=0), str(tmp_path))
    )
    case = Case(method="PROMPT_TUNING", policy="transformer", use_orig_params=True)
    with pytest.raises(TimeoutError):
        run_ranks(saved_by_the_first, case, str(tmp_path), deadline_seconds=10)
