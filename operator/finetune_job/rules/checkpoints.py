"""The form of saved state."""

from __future__ import annotations

from finetune_job.api.parallelism import StateDictType
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule
from finetune_job.rules.rule import Reproduction

_TYPE = "parallelism.fsdp.stateDictType"


@rule(
    "local-state-dict",
    "A local state dict cannot be read back",
    reads=(_TYPE,),
    sources=("accelerate: accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin",),
    reproduction=Reproduction(
        "tests/pitfalls/test_checkpoints.py::test_fsdp_2_has_no_local_state_dict",
        "ValueError: FSDP2 does not support LOCAL_STATE_DICT",
    ),
    holds_for="accelerate >= 1.0, both FSDP versions",
)
def local_state_dict(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.state_dict_type
    if written is not StateDictType.LOCAL_STATE_DICT:
        return None
    return Problem(
        field=_TYPE,
        value=written,
        message="FSDP 2 has no such form, and under FSDP 1 what it saves is not found again on resuming",
        fix=f"remove {_TYPE}: checkpoints are sharded and can be read by any number of ranks",
        changes={_TYPE: None},
    )


RULES = (local_state_dict,)
