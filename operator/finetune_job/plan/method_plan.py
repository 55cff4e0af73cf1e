"""The part of a plan that says what is trained of the model, and how adapters are made."""

from typing import Any

from pydantic import Field

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import LoraBias, LoraInit, MethodType, QuantStorage, QuantType
from finetune_job.methods import METHODS
from finetune_job.plan.launch_plan import PlanModel, TrainedParts


class LoraPlan(PlanModel):
    """PEFT's LoraConfig."""

    r: int
    lora_alpha: int
    lora_dropout: float
    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    """None: all."""
    init_lora_weights: LoraInit = LoraInit.ZERO_B
    modules_to_save: tuple[str, ...]
    trainable_token_indices: tuple[int, ...] = ()
    separate_token_rows: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Rows by module, in place of `trainable_token_indices`: where the output head has rows of added tokens that are not the
    embedding's. Filled in by the trainer, which knows their ids."""
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, int]
    lora_plus_ratio: float | None = None
    """None: one learning rate for all."""
    use_rslora: bool
    use_dora: bool
    bias: LoraBias
    autocast_adapter_dtype: bool
    fused_forward: bool = False
    """Whether layers compute in the base's element type with rounded copies of their factors, and add by the second product."""

    @property
    def starts_from_base(self) -> bool:
        """Whether first values are computed from the base's weights and kept for the whole run."""
        return self.init_lora_weights.decomposes_base


class AdapterPlan(PlanModel):
    """PEFT's configuration of a method other than LoRA's family."""

    settings: dict[str, Any]
    """By PEFT's own field names in camelCase, as the user wrote them."""
    autocast_adapter_dtype: bool


class QuantizationPlan(PlanModel):
    """transformers' BitsAndBytesConfig; None: the model's element type."""

    bits: int
    quant_type: QuantType
    double_quant: bool
    compute_dtype: Dtype | None
    quant_storage: QuantStorage | None


class MethodPlan(TrainedParts):
    """Fine-tuning method. `lora` is set for the kinds of LoRA, `adapter` for the other methods of PEFT, neither for Full."""

    type: MethodType
    lora: LoraPlan | None
    adapter: AdapterPlan | None = None
    quantization: QuantizationPlan | None
    """Set for QLoRA and QDoRA alone."""

    @property
    def autocast_adapter_dtype(self) -> bool:
        """Whether adapters are held in float32 next to a base of 16 bits."""
        held = self.lora or self.adapter
        return held is not None and held.autocast_adapter_dtype

    @property
    def is_fused(self) -> bool:
        """Whether adapters compute in the element type of the base without being cast to it."""
        return self.lora is not None and self.lora.fused_forward

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """Names of modules of the base that are trained whole, and published with the adapter."""
        if self.lora is not None:
            return self.lora.modules_to_save
        return () if self.adapter is None else tuple(self.adapter.settings.get("modulesToSave") or ())

    @property
    def trains_parts_of_the_base(self) -> bool:
        """Whether whole modules or biases are trained, which compute among the base's other parts as those do."""
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
