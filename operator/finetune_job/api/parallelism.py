"""`spec.parallelism`: ranks and FSDP, in accelerate's vocabulary."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_job.api.base import ApiModel, ModuleName
from finetune_job.api.enumerations import Dtype


class AutoWrapPolicy(StrEnum):
    """The modules that become FSDP units."""

    TRANSFORMER_BASED_WRAP = "TRANSFORMER_BASED_WRAP"
    SIZE_BASED_WRAP = "SIZE_BASED_WRAP"
    NO_WRAP = "NO_WRAP"


class StateDictType(StrEnum):
    """Form of the state dict under FSDP."""

    FULL_STATE_DICT = "FULL_STATE_DICT"
    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"
    LOCAL_STATE_DICT = "LOCAL_STATE_DICT"


class MixedPrecisionSpec(ApiModel):
    """Element types inside an FSDP unit."""

    param_dtype: Dtype | None = None
    """Type of gathered parameters in forward and backward. Unset: bfloat16 with bf16 precision, else none.

    On one rank and under version 1 nothing is gathered; a frozen base of the other 16-bit type is then held in this type.
    """
    reduce_dtype: Dtype | None = None
    """Type of gradients while they are reduced. Unset: float32."""


class FsdpSpec(ApiModel):
    """Fully sharded data parallelism."""

    version: Annotated[int, Field(ge=1, le=2)] = 2
    """Version of FSDP. 2: torch's fully_shard. 1: FullyShardedDataParallel."""
    auto_wrap_policy: AutoWrapPolicy | None = None
    """Policy that chooses the units. Unset: TRANSFORMER_BASED_WRAP."""
    transformer_layer_cls_to_wrap: Annotated[list[ModuleName], Field(max_length=16)] | None = None
    """Layer classes that become units. Unset: the model's own layer classes, found in preflight and recorded."""
    min_num_params: Annotated[int, Field(ge=1)] | None = None
    """Smallest unit of SIZE_BASED_WRAP, in parameters."""
    peft_wrap_policy: bool | None = None
    """Wrap trainable leaf modules in units of their own (PEFT's fsdp_auto_wrap_policy); version 1 only.
    Unset: true where an adapter needs it."""
    use_orig_params: bool | None = None
    """Keep the original parameters; version 1 only. Unset: false with peftWrapPolicy, else true."""
    sync_module_states: bool | None = None
    """Version 1 only: broadcast rank 0's weights at the start. Unset: true."""
    cpu_ram_efficient_loading: bool | None = None
    """Only rank 0 reads the weights. No effect: every rank reads them from the claim."""
    reshard_after_forward: bool | None = None
    """Version 2: free gathered parameters after the forward pass. Unset: false if preflight finds that a rank has memory for all
    weights at once, else true."""
    state_dict_type: StateDictType | None = None
    """Form of saved state. FULL and SHARDED have no effect: checkpoints have their own sharded format."""
    offload_params: bool = False
    """Keep parameters on the CPU between uses."""
    activation_checkpointing: bool | None = None
    """FSDP's own recomputation; set training.activationCheckpointing instead."""
    mixed_precision: MixedPrecisionSpec | None = None
    """Element types inside a unit."""


class ElasticSpec(ApiModel):
    """A gang that trains on the nodes that are available, with the same bytes in the end. Needs `training.reduction: Ordered`."""

    min_nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Fewest nodes on which the gang trains; `parallelism.nodes` is the most. After a waiting time it starts on the nodes that it
    has; it continues without a node that is lost or taken back, and grows again later. The profile sets the times."""


class ParallelismSpec(ApiModel):
    """Nodes, ranks and sharding."""

    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Pods of the gang."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks per pod: one per GPU, or the number of CPU ranks."""
    elastic: ElasticSpec | None = None
    """Train on fewer nodes while not all are available. Unset: always on all of `nodes`."""
    fsdp: FsdpSpec = FsdpSpec.model_construct()
    """Sharding."""
