"""Which FSDP settings mean something under which version: the one table that rules and documentation share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.parallelism import StateDictType
from finetune_job.rules.rule import OURS, Problem, Reproduction, Rule, RuleContext, rule

_STATE_DICT_TYPE = "parallelism.fsdp.stateDictType"


@dataclass(frozen=True)
class FsdpField:
    """One field of `spec.parallelism.fsdp` that not every version uses."""

    name: str
    """As the manifest writes it."""
    attribute: str
    used_by: tuple[int, ...]
    """FSDP versions under which this trainer acts on it."""
    why: str
    """Why it means nothing under the others."""
    quiet: tuple[Any, ...] = ()
    """Values that need no warning: they ask for what happens anyway, or another rule speaks of them."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """What to set in its place."""


FSDP_FIELDS = (
    FsdpField("peftWrapPolicy", "peft_wrap_policy", (1,), "version 2 flattens nothing: trainable and frozen may share a unit"),
    FsdpField("useOrigParams", "use_orig_params", (1,), "version 2 has no flat parameters and always shows the original ones"),
    FsdpField("syncModuleStates", "sync_module_states", (1,), "under version 2 each rank reads its own shard of the weights"),
    FsdpField("reshardAfterForward", "reshard_after_forward", (2,), "version 1 always shards fully"),
    FsdpField("cpuRamEfficientLoading", "cpu_ram_efficient_loading", (), "every rank reads the weights from the claim"),
    FsdpField(
        "stateDictType",
        "state_dict_type",
        (),
        "the trainer saves in its own sharded format, which any number of ranks can read",
        quiet=(StateDictType.LOCAL_STATE_DICT,),
    ),
    FsdpField(
        "activationCheckpointing",
        "activation_checkpointing",
        (),
        "recomputation is asked for in training.activationCheckpointing",
        quiet=(False,),
        instead={"training.activationCheckpointing": "Full"},
    ),
)


def _fsdp_field_rule(row: FsdpField) -> Rule:
    path = f"parallelism.fsdp.{row.name}"

    @rule(
        f"no-effect-{row.attribute.replace('_', '-')}",
        f"{row.name} has no effect"
        + (f" under version {' and '.join(str(v) for v in (1, 2) if v not in row.used_by)}" if row.used_by else ""),
        severity="warning",
        reads=("parallelism.fsdp.version", path, *row.instead),
        sources=("torch: torch/distributed/fsdp; accelerate: FullyShardedDataParallelPlugin",),
        reproduction=Reproduction(
            "tests/pitfalls/test_no_effect.py::test_what_nothing_reads",
            "no error: the run's plan is the same with and without it",
        ),
        holds_for=OURS,
    )
    def check(context: RuleContext) -> Problem | None:
        fsdp = context.spec.parallelism.fsdp
        value = getattr(fsdp, row.attribute)
        if value is None or fsdp.version in row.used_by or value in row.quiet:
            return None
        # What the user has asked for in the right place stays as it is.
        instead = {other: setting for other, setting in row.instead.items() if not _is_set(context.spec, other)}
        written = ", ".join(f"set {other} to {setting}" for other, setting in instead.items())
        return Problem(
            field=path,
            value=value,
            message=f"NoEffect: {row.why}",
            fix=f"remove {path}" + (f" and {written}" if written else ""),
            changes={path: None, **instead},
        )

    return check


def _is_set(spec: FineTuneJobSpec, path: str) -> bool:
    section, _, name = path.partition(".")
    return name in spec.model_dump(include={section}, by_alias=True, exclude_none=True)[section]


@rule(
    "local-state-dict",
    "A local state dict cannot be read back",
    reads=(_STATE_DICT_TYPE,),
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
        field=_STATE_DICT_TYPE,
        value=written,
        message="FSDP 2 has no such form, and under FSDP 1 it holds each rank's flat shards, under names that no parameter has",
        fix=f"remove {_STATE_DICT_TYPE}: checkpoints are sharded and can be read by any number of ranks",
        changes={_STATE_DICT_TYPE: None},
    )


RULES = (*(_fsdp_field_rule(row) for row in FSDP_FIELDS), local_state_dict)
