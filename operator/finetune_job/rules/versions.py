"""The table of FSDP settings that have no effect under some FSDP versions; used by rules and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.parallelism import StateDictType
from finetune_job.rules.rule import Problem, RuleContext, rule


@dataclass(frozen=True)
class FsdpField:
    """A field of `spec.parallelism.fsdp` that some FSDP versions do not use."""

    name: str
    """Name of the setting in a manifest."""
    attribute: str
    used_by: tuple[int, ...]
    """FSDP versions under which this trainer uses the field."""
    why: str
    """Why the field has no effect under other versions."""
    quiet: tuple[Any, ...] = ()
    """Values that cause no warning, because they request what happens anyway or because another rule covers them."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """Settings to use instead of this one."""


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
        "recomputation is set in training.activationCheckpointing",
        quiet=(False,),
        instead={"training.activationCheckpointing": "Full"},
    ),
)


def _register(row: FsdpField) -> None:
    path = f"parallelism.fsdp.{row.name}"

    @rule(f"no-effect-{row.attribute.replace('_', '-')}")
    def check(context: RuleContext) -> Problem | None:
        fsdp = context.spec.parallelism.fsdp
        value = getattr(fsdp, row.attribute)
        if value is None or fsdp.version in row.used_by or value in row.quiet:
            return None
        # Keep what the user has already set in the right place.
        instead = {other: setting for other, setting in row.instead.items() if not _is_set(context.spec, other)}
        written = ", ".join(f"set {other} to {setting}" for other, setting in instead.items())
        return Problem(
            value=value,
            message=f"NoEffect: {row.why}",
            fix=f"remove {path}" + (f" and {written}" if written else ""),
            field=path,
            changes={path: None, **instead},
        )


def _is_set(spec: FineTuneJobSpec, path: str) -> bool:
    section, _, name = path.partition(".")
    return name in spec.model_dump(include={section}, by_alias=True, exclude_none=True)[section]


@rule("local-state-dict")
def local_state_dict(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.state_dict_type
    if written is not StateDictType.LOCAL_STATE_DICT:
        return None
    return Problem(value=written)


for _row in FSDP_FIELDS:
    _register(_row)
