"""Forms of saved state that cannot be read back."""

import pytest

from tests.pitfalls.lab.build import adapted, load_base, sharded
from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import plans


def test_fsdp_2_has_no_local_state_dict():
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin

    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")
    wrong, right = plans("local-state-dict", {"parallelism.fsdp.stateDictType": "LOCAL_STATE_DICT"})
    assert wrong.parallelism == right.parallelism, "nothing would heed it"


def saved_names(rank: int, form: str) -> list[str]:
    """Under which an adapter is saved by torch's FSDP 1."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = sharded(Case(), adapted(Case(), load_base(Case())))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[form]):
        return [name for name in model.state_dict() if "lora_" in name]


def test_a_local_state_dict_of_fsdp_1_knows_no_parameter():
    """What reads it has to have the same units on the same number of ranks; `local-state-dict`."""
    local, whole = (run_ranks(saved_names, form)[0].value for form in ("LOCAL_STATE_DICT", "SHARDED_STATE_DICT"))
    assert {name.rpartition(".")[2] for name in local} == {"_flat_param"}
    assert {name.rpartition(".")[2] for name in whole} == {"weight"}
