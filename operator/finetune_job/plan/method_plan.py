"""The part of a plan for the trained parameters and adapters."""

from typing import Any

from pydantic import Field

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import LoraBias, LoraInit, MethodType, QuantStorage, QuantType
from finetune_job.methods import METHODS
from finetune_job.plan.launch_plan import PlanModel, TrainedParts


class LoraPlan(PlanModel):
    """The settings of PEFT's LoraConfig."""

    r: int
    lora_alpha: int
    lora_dropout: float
    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    """Indices of the adapted layers; None for all layers."""
    init_lora_weights: LoraInit = LoraInit.ZERO_B
    modules_to_save: tuple[str, ...]
    trainable_token_indices: tuple[int, ...] = ()
    separate_token_rows: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Trained rows by module. Replaces `trainable_token_indices` if the output head has its own rows for added tokens. Filled in
    by the trainer, which knows the token ids."""
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, int]
    lora_plus_ratio: float | None = None
    """Ratio of the learning rates of lora_B and lora_A; None if they are the same."""
    use_rslora: bool
    use_dora: bool
    bias: LoraBias
    autocast_adapter_dtype: bool
    fused_forward: bool = False
    """Whether adapters round their factors to the base's element type and fuse the second product with the addition."""

    @property
    def starts_from_base(self) -> bool:
        """Whether initial values are computed from the base's weights, once for the whole run."""
        return self.init_lora_weights.decomposes_base


class AdapterPlan(PlanModel):
    """PEFT's configuration of a method outside LoRA's family."""

    settings: dict[str, Any]
    """Settings by PEFT's own field names in camelCase, as the user wrote them."""
    autocast_adapter_dtype: bool


class QuantizationPlan(PlanModel):
    """The settings of transformers' BitsAndBytesConfig; None as an element type means that of the model."""

    bits: int
    quant_type: QuantType
    double_quant: bool
    compute_dtype: Dtype | None
    quant_storage: QuantStorage | None


class MethodPlan(TrainedParts):
    """Fine-tuning method. `lora` is set for LoRA and its variants, `adapter` for other methods of PEFT, and neither for Full."""

    type: MethodType
    lora: LoraPlan | None
    adapter: AdapterPlan | None = None
    quantization: QuantizationPlan | None
    """How the base is quantised; set only for QLoRA and QDoRA."""

    @property
    def autocast_adapter_dtype(self) -> bool:
        """Whether adapters are held in float32 although the base has 16 bits."""
        adapter = self.lora or self.adapter
        return adapter is not None and adapter.autocast_adapter_dtype

    @property
    def is_fused(self) -> bool:
        """Whether adapters compute in the base's element type, regardless of the type in which they are held."""
        return self.lora is not None and self.lora.fused_forward

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """Names of base modules that are trained in full and saved with the adapter."""
        if self.lora is not None:
            return self.lora.modules_to_save
        return () if self.adapter is None else tuple(self.adapter.settings.get("modulesToSave") or ())

    @property
    def trains_parts_of_the_base(self) -> bool:
        """Whether whole modules or biases of the base are trained; these must compute in the type of the surrounding base."""
        if self.lora is not None:
            return bool(self.saved_modules) or self.lora.bias is not LoraBias.NONE
        if self.adapter is None:
            return False
        settings = self.adapter.settings
        return (
            METHODS[self.type].needs.trains_base_modules
            or bool(self.saved_modules)
            or settings.get("bias", LoraBias.NONE.value) != LoraBias.NONE.value
        )
