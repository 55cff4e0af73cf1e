"""What a case of the lab is: settings of the libraries, in their own words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Stage = Literal["load", "adapt", "shard", "forward", "backward", "step", "save", "resume", "merge"]
STAGES: tuple[Stage, ...] = ("load", "adapt", "shard", "forward", "backward", "step", "save", "resume", "merge")


@dataclass(frozen=True)
class Case:
    """Settings of one run; the defaults train LoRA on a tiny Llama under FSDP 1 with PEFT's wrap policy."""

    model: str = "llama"
    """A model of lab/models.py."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that replace those of the model's configuration, such as {"tie_word_embeddings": True}."""
    dtype: str = "float32"
    """Element type in which the base is loaded."""
    bits: int | None = None
    """4 (NF4) or 8: bitsandbytes quantises the base."""
    storage: str | None = None
    """bnb_4bit_quant_storage; None: the library's default, uint8."""
    compute: str | None = None
    """bnb_4bit_compute_dtype; None: `dtype`."""
    unpacked: bool = False
    """Whether the 4-bit weights are unpacked again after loading, by plain arithmetic: what training on them must be equal to."""
    kbit_preparation: bool = False
    """Whether PEFT's prepare_model_for_kbit_training runs before the adapter is attached."""
    method: str | None = "LORA"
    """PEFT's type of the adapter; None: the whole model is trained."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the adapter besides `task_type`, over those of `ADAPTERS`."""
    autocast: bool = True
    """get_peft_model's autocast_adapter_dtype."""
    attach_after_wrapping: bool = False
    version: int | None = 1
    """1 or 2: FSDP; 0: DDP; None: no wrapper."""
    policy: str = "peft"
    """FSDP 1: peft, transformer, size or none. FSDP 2 and DDP do not look at it; FSDP 2 wraps each layer and the root."""
    min_num_params: int = 1000
    """Of the size policy."""
    use_orig_params: bool = False
    param_dtype: str | None = None
    """Of FSDP's mixed precision."""
    compute_autocast: str | None = None
    """Element type of torch.autocast around the forward pass."""
    checkpointing: str | None = None
    """Activation checkpointing of transformers: reentrant or non-reentrant."""
    evaluate_first: bool = False
    """Whether a forward pass in evaluation mode comes before the first training step."""
    train_mode: bool = True
    """False: the model stays in evaluation mode, as from_pretrained returns it."""
    world_size: int = 2
    steps: int = 3
    """Steps of AdamW after the one that shows the gradients."""
    save: str = "gathered"
    """gathered: the state dict of all ranks, written by the first; naive: save_pretrained as in one process."""
    merge: str = "apart"
    """apart: one process merges the saved adapter; sharded: merge_and_unload where it was trained."""
    until: Stage = "step"
    """Last stage that is run."""

    def reaches(self, stage: Stage) -> bool:
        """Whether this stage is run."""
        return STAGES.index(stage) <= STAGES.index(self.until)
