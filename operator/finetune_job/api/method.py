"""`spec.method`: what is trained, in PEFT's own vocabulary."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_job.api.base import ApiModel, DecimalString, Dtype, ModuleName


class MethodType(StrEnum):
    """Fine-tuning methods."""

    LORA = "LoRA"
    QLORA = "QLoRA"
    DORA = "DoRA"
    FULL = "Full"


ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the output head."""


class LoraBias(StrEnum):
    """Which biases are trained beside the adapter."""

    NONE = "none"
    ALL = "all"
    LORA_ONLY = "lora_only"


class LoraSpec(ApiModel):
    """Settings of LoRA, QLoRA and DoRA: PEFT's LoraConfig."""

    r: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the update."""
    lora_alpha: Annotated[int, Field(ge=1, le=65536)] | None = None
    """The update is scaled by loraAlpha / r (by loraAlpha / sqrt(r) with useRslora). Unset: 2 r."""
    lora_dropout: DecimalString | None = None
    """Dropout on the adapter's input, below 1. Unset: "0"."""
    target_modules: Annotated[list[ModuleName], Field(min_length=1, max_length=256)] | None = None
    """Names of the modules to adapt, or `all-linear`. Unset: all-linear (every linear layer but the output head)."""
    modules_to_save: Annotated[list[ModuleName], Field(max_length=64)] | None = None
    """Modules that are trained and saved whole beside the adapter."""
    rank_pattern: Annotated[dict[str, Annotated[int, Field(ge=1, le=4096)]], Field(max_length=256)] | None = None
    """Rank by module name (a regular expression on the end of the name)."""
    alpha_pattern: Annotated[dict[str, Annotated[int, Field(ge=1, le=65536)]], Field(max_length=256)] | None = None
    """loraAlpha by module name (a regular expression on the end of the name)."""
    use_rslora: bool = False
    """Scale by 1 / sqrt(r) instead of 1 / r."""
    bias: LoraBias = LoraBias.NONE
    """Which biases are trained."""
    autocast_adapter_dtype: bool | None = None
    """Hold adapter weights in float32 where the base is bfloat16 or float16. Unset: true."""


class QuantType(StrEnum):
    """4-bit code books of bitsandbytes."""

    NF4 = "nf4"
    FP4 = "fp4"


class QuantStorage(StrEnum):
    """Element type in which packed 4-bit weights lie in memory."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    UINT8 = "uint8"


class QuantizationSpec(ApiModel):
    """Settings of the quantised base of QLoRA: transformers' BitsAndBytesConfig."""

    bits: Annotated[int, Field(ge=4, le=8)] = 4
    """Bits per weight: 4 or 8."""
    quant_type: QuantType | None = None
    """Code book. Unset: nf4."""
    double_quant: bool | None = None
    """Quantise the quantisation constants too. Unset: true."""
    compute_dtype: Dtype | None = None
    """Element type of the matrix products. Unset: the model's."""
    quant_storage: QuantStorage | None = None
    """Element type that holds the packed weights. Unset: the model's, which is what FSDP needs."""


class MethodSpec(ApiModel):
    """How the model is fine-tuned."""

    type: MethodType = MethodType.LORA
    """Method."""
    lora: LoraSpec | None = None
    """Adapter settings; not allowed with Full."""
    quantization: QuantizationSpec | None = None
    """Settings of the quantised base; only with QLoRA."""
