"""`spec.method`: the trained parameters, in PEFT's own vocabulary."""

import re
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from finetune_job.api.base import DECIMAL_PATTERN, LONGEST_DECIMAL, ApiModel, DecimalString, ModuleName, PatternKey
from finetune_job.api.enumerations import Dtype
from finetune_job.api.json_values import MAX_JSON_VALUES, check_json_values


class MethodType(StrEnum):
    """Fine-tuning methods: those that methods.py supports, and those that unsupported_methods.py refuses with a reason."""

    LORA = "LoRA"
    QLORA = "QLoRA"
    DORA = "DoRA"
    QDORA = "QDoRA"
    """DoRA on a packed base: PEFT's `use_dora` with a quantised model."""
    FULL = "Full"
    LOHA = "LoHa"
    LOKR = "LoKr"
    ADALORA = "AdaLoRA"
    IA3 = "IA3"
    VERA = "VeRA"
    OFT = "OFT"
    BOFT = "BOFT"
    HRA = "HRA"
    FOURIERFT = "FourierFT"
    LN_TUNING = "LNTuning"
    RANDLORA = "RandLoRA"
    MISS = "MiSS"
    VBLORA = "VBLoRA"
    XLORA = "XLoRA"
    HIRA = "HiRA"
    SHIRA = "SHiRA"
    C3A = "C3A"
    WAVEFT = "WaveFT"
    OSF = "OSF"
    DELORA = "DeLoRA"
    GRALORA = "GraLoRA"
    ROAD = "RoAd"
    GLORA = "GLoRA"
    LILY = "Lily"
    PVERA = "PVeRA"
    FROD = "FRoD"
    UNILORA = "UniLoRA"
    ADAMSS = "AdaMSS"
    BEFT = "BEFT"
    TINYLORA = "TinyLoRA"
    PSOFT = "PSOFT"
    PEANUT = "PEANuT"
    SHADOW = "Shadow"
    SUPERTUNING = "SuperTuning"
    DEFT = "DEFT"
    POLY = "Poly"
    TRAINABLE_TOKENS = "TrainableTokens"
    PROMPT_TUNING = "PromptTuning"
    MULTITASK_PROMPT_TUNING = "MultitaskPromptTuning"
    P_TUNING = "PTuning"
    PREFIX_TUNING = "PrefixTuning"
    CPT = "CPT"
    CARTRIDGE = "Cartridge"
    ADAPTION_PROMPT = "AdaptionPrompt"


ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the output head."""


class LoraBias(StrEnum):
    """The biases that are trained with the adapter."""

    NONE = "none"
    ALL = "all"
    LORA_ONLY = "lora_only"


class LoraInit(StrEnum):
    """First values of the adapter: PEFT's `init_lora_weights`."""

    ZERO_B = "ZeroB"
    """A random, B zero: training starts at the base model. PEFT's `True`."""
    GAUSSIAN = "gaussian"
    """Like ZeroB, with a normally distributed A."""
    ORTHOGONAL = "orthogonal"
    """A and B random with orthogonal rows and columns; their product is zero."""
    RANDOM = "Random"
    """A and B random: training does not start at the base model. PEFT's `False`."""
    PISSA = "pissa"
    """PiSSA: the r largest singular values of each weight and their vectors; the base keeps the rest. Slow for large weights,
    because all singular values are computed."""
    PISSA_NITER_4 = "pissa_niter_4"
    """Like pissa, with a fast randomised decomposition in 4 iterations."""
    PISSA_NITER_8 = "pissa_niter_8"
    PISSA_NITER_16 = "pissa_niter_16"
    PISSA_NITER_32 = "pissa_niter_32"
    OLORA = "olora"
    """OLoRA: an orthogonal basis of the first r columns of each weight, and the weight's coordinates in it."""
    CORDA = "corda"
    LOFTQ = "loftq"
    EVA = "eva"

    @property
    def decomposes_base(self) -> bool:
        """Whether the adapter starts with a part of the base's own weights."""
        return self is LoraInit.OLORA or self.value.startswith(LoraInit.PISSA.value)


TokenIndex = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A token's id: its row of the embedding."""


class LoraSpec(ApiModel):
    """Settings of LoRA, QLoRA, DoRA and QDoRA: PEFT's LoraConfig."""

    r: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the update."""
    lora_alpha: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Scale of the update: it is multiplied by loraAlpha / r (by loraAlpha / sqrt(r) with useRslora). Unset: 2 r."""
    lora_dropout: DecimalString | None = None
    """Dropout on the adapter's input, below 1. Unset: "0"."""
    target_modules: Annotated[list[ModuleName], Field(max_length=256)] | None = None
    """Names of the modules to adapt, or `all-linear`. Unset: all-linear (every linear layer but the output head); with
    targetParameters: none, which an empty list also means."""
    target_parameters: Annotated[list[ModuleName], Field(min_length=1, max_length=64)] | None = None
    """Names of parameters to adapt that are not a layer's weight, above all the stacked weights of experts, as in
    `[mlp.experts.gate_up_proj, mlp.experts.down_proj]`: ends of the names of parameters with two or three dimensions. In all
    layers, without dropout, DoRA or QDoRA. If targetModules is unset, only these parameters are adapted."""
    exclude_modules: Annotated[list[ModuleName], Field(min_length=1, max_length=256)] | None = None
    """Names of modules that get no adapter even if targetModules names them. Unset: in a model of images or audio, the modules
    outside its text part that share their names with modules in it, because no text reaches them."""
    layers_to_transform: Annotated[list[Annotated[int, Field(ge=0, le=4095)]], Field(min_length=1, max_length=4096)] | None = None
    """Numbers of the layers to adapt, from 0. Unset: all."""
    init_lora_weights: LoraInit = LoraInit.ZERO_B
    """First values of the adapter. pissa, pissa_niter_4 to 32 and olora start it with a part of the base's weights. The published
    base stays as it is: the adapter is published as plain LoRA of twice the rank."""
    modules_to_save: Annotated[list[ModuleName], Field(max_length=64)] | None = None
    """Modules that are trained and saved whole with the adapter."""
    trainable_token_indices: Annotated[list[TokenIndex], Field(min_length=1, max_length=1024)] | None = None
    """Ids of tokens whose rows of the input embedding are trained and saved with the adapter, such as tokens that the model has
    not learnt yet. Each id once. If the output head shares the embedding's weight, its rows follow."""
    rank_pattern: Annotated[dict[PatternKey, Annotated[int, Field(ge=1, le=4096)]], Field(max_length=256)] | None = None
    """Rank by module name (a regular expression on the end of the name)."""
    alpha_pattern: Annotated[dict[PatternKey, Annotated[int, Field(ge=1, le=65536)]], Field(max_length=256)] | None = None
    """loraAlpha by module name (a regular expression on the end of the name)."""
    lora_plus_ratio: DecimalString | None = None
    """LoRA+: learning rate of lora_B as a multiple of that of lora_A, at least 1. Unset: one rate for both."""
    use_rslora: bool = False
    """Scale the update by 1 / sqrt(r) instead of 1 / r."""
    bias: LoraBias = LoraBias.NONE
    """Biases that are trained."""
    autocast_adapter_dtype: bool | None = None
    """Hold adapter weights in float32 if the base is bfloat16 or float16. Unset: true."""
    peft_forward: bool | None = None
    """Compute adapters with PEFT's own layers, which cast inputs and not factors. Unset: false on a GPU for LoRA and QLoRA (4
    bits, first values not from the base, no FSDP 1 units of their own), else true."""


class QuantType(StrEnum):
    """4-bit code books of bitsandbytes."""

    NF4 = "nf4"
    FP4 = "fp4"


class QuantStorage(StrEnum):
    """Element type in which packed 4-bit weights are kept in memory."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    UINT8 = "uint8"


class QuantizationSpec(ApiModel):
    """Settings of the quantised base of QLoRA and QDoRA: transformers' BitsAndBytesConfig."""

    bits: Annotated[int, Field(ge=4, le=8)] = 4
    """Bits per weight: 4, or 8 for QLoRA on one rank."""
    quant_type: QuantType | None = None
    """Code book. Unset: nf4."""
    double_quant: bool | None = None
    """Quantise the quantisation constants too. Unset: true."""
    compute_dtype: Dtype | None = None
    """Element type of the matrix products. Unset: the model's."""
    quant_storage: QuantStorage | None = None
    """Element type that holds the packed weights. Unset: the model's, which is what FSDP needs."""


_SETTING_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")


def _check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return check_json_values(
        settings, _SETTING_NAME, "a setting; write PEFT's own field name in camelCase, such as targetModules"
    )


# The length comes first: after a validator it would not reach the JSON schema, and so not the CRD.
MethodSettings = Annotated[dict[str, Any], Field(max_length=MAX_JSON_VALUES), AfterValidator(_check_settings)]
"""Fields of PEFT's configuration of a method, in camelCase; numbers with a fraction are strings."""


def is_decimal(text: str) -> bool:
    """Whether a setting's string is a number with a fraction in the form that this API requires."""
    return len(text) <= LONGEST_DECIMAL and re.fullmatch(DECIMAL_PATTERN, text) is not None


class MethodSpec(ApiModel):
    """The fine-tuning method and its settings."""

    type: MethodType = MethodType.LORA
    """Fine-tuning method: the whole model (Full), or an adapter. docs/reference/methods.md describes each method."""
    lora: LoraSpec | None = None
    """Adapter settings; only with LoRA, QLoRA, DoRA and QDoRA."""
    settings: MethodSettings | None = None
    """Settings of the other methods: PEFT's own field names in camelCase, numbers with a fraction as strings, as in
    `{r: 8, alpha: 16, targetModules: [q_proj], moduleDropout: "0.1"}`. Unset: PEFT's defaults, on every linear layer but the
    output head. Preflight checks names and types."""
    quantization: QuantizationSpec | None = None
    """Settings of the quantised base; only with QLoRA and QDoRA."""
