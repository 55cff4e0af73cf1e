"""`spec.method`: what is trained, in PEFT's own vocabulary."""

import re
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from finetune_job.api.base import DECIMAL_PATTERN, LONGEST_DECIMAL, ApiModel, DecimalString, ModuleName, PatternKey
from finetune_job.api.enumerations import Dtype


class MethodType(StrEnum):
    """Fine-tuning methods: those of finetune_job/methods.py, and those that unsupported_methods.py answers with a reason."""

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
    """Which biases are trained with the adapter."""

    NONE = "none"
    ALL = "all"
    LORA_ONLY = "lora_only"


class LoraInit(StrEnum):
    """First values of the adapter: PEFT's `init_lora_weights`."""

    ZERO_B = "ZeroB"
    """A random, B zero: training starts at the base model. PEFT's `True`."""
    GAUSSIAN = "gaussian"
    """The same with a normal A."""
    ORTHOGONAL = "orthogonal"
    """A and B random with orthogonal rows and columns; their product is zero."""
    RANDOM = "Random"
    """A and B random: training does not start at the base model. PEFT's `False`."""
    PISSA = "pissa"
    """PiSSA: the largest r singular values of each weight and their vectors, of which the base keeps the rest. Slow for large
    weights, because all of them are computed."""
    PISSA_NITER_4 = "pissa_niter_4"
    """The same by a randomised decomposition with so many iterations, which is fast."""
    PISSA_NITER_8 = "pissa_niter_8"
    PISSA_NITER_16 = "pissa_niter_16"
    PISSA_NITER_32 = "pissa_niter_32"
    OLORA = "olora"
    """OLoRA: the first r columns of each weight, made orthogonal, and what they say of the weight."""
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
    """The update is scaled by loraAlpha / r (by loraAlpha / sqrt(r) with useRslora). Unset: 2 r."""
    lora_dropout: DecimalString | None = None
    """Dropout on the adapter's input, below 1. Unset: "0"."""
    target_modules: Annotated[list[ModuleName], Field(max_length=256)] | None = None
    """Names of the modules to adapt, or `all-linear`. Unset: all-linear (every linear layer but the output head); with
    targetParameters: none, as an empty list says, too."""
    target_parameters: Annotated[list[ModuleName], Field(min_length=1, max_length=64)] | None = None
    """Names of parameters to adapt that are not a layer's weight, above all the stacked weights of experts, as in
    `[mlp.experts.gate_up_proj, mlp.experts.down_proj]`: ends of parameter names, of two or three dimensions. In all layers;
    without dropout and not with DoRA or QDoRA. Alone, only they are adapted; name targetModules, too, to adapt both."""
    exclude_modules: Annotated[list[ModuleName], Field(min_length=1, max_length=256)] | None = None
    """Names of modules that get no adapter although targetModules names them."""
    layers_to_transform: Annotated[list[Annotated[int, Field(ge=0, le=4095)]], Field(min_length=1, max_length=4096)] | None = None
    """Numbers of the layers to adapt, from 0. Unset: all."""
    init_lora_weights: LoraInit = LoraInit.ZERO_B
    """First values of the adapter. pissa, pissa_niter_4 to 32 and olora start it with a part of the base's weights, which stay as
    they are: the adapter is published as plain LoRA of twice the rank."""
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
    """Scale by 1 / sqrt(r) instead of 1 / r."""
    bias: LoraBias = LoraBias.NONE
    """Which biases are trained."""
    autocast_adapter_dtype: bool | None = None
    """Hold adapter weights in float32 where the base is bfloat16 or float16. Unset: true."""
    peft_forward: bool | None = None
    """Compute adapters by PEFT's own layers, which cast inputs and not factors. Unset: false for LoRA and QLoRA (4 bits, no start
    from a part of the base, no unit of its own under FSDP 1) on a GPU, else true."""


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


MAX_SETTINGS = 64
MAX_SETTING_TEXT = 4096
MAX_SETTING_KEY = 512
MAX_SETTING_ITEMS = 1024
MAX_SETTING_DEPTH = 8
MAX_SETTING_VALUES = 10_000
"""Of all settings together, at every depth."""
_SETTING_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")
_LARGEST_INTEGER = 2**63 - 1


def _fault(value: Any, depth: int = 1) -> tuple[str, str] | None:
    """What every JSON round trip keeps unchanged, and what the data classes of PEFT can hold, has none. Else: the place inside
    the value, and the reason with its fix. The place is put together only here, so that a large value costs no more than its
    size.
    """
    if depth > MAX_SETTING_DEPTH:
        return "", f"is nested deeper than {MAX_SETTING_DEPTH}; no setting is"
    match value:
        case None | bool():
            return None
        case int():
            too_large = abs(value) > _LARGEST_INTEGER
            return ("", "is larger than any number of Kubernetes; write a smaller one") if too_large else None
        case str():
            return _fault_of_text(value, MAX_SETTING_TEXT)
        case float():
            return "", f'floats do not survive every JSON round trip unchanged; write "{value}" in quotes'
        case list():
            if len(value) > MAX_SETTING_ITEMS:
                return "", f"has {len(value)} items; at most {MAX_SETTING_ITEMS} are allowed"
            for number, item in enumerate(value):
                if (fault := _fault(item, depth + 1)) is not None:
                    return f"[{number}]{fault[0]}", fault[1]
            return None
        case dict():
            if len(value) > MAX_SETTING_ITEMS:
                return "", f"has {len(value)} entries; at most {MAX_SETTING_ITEMS} are allowed"
            for name, item in value.items():
                if (fault := _fault_of_text(name, MAX_SETTING_KEY) or _fault(item, depth + 1)) is not None:
                    return f".{ascii(name)[1:-1]:.100}{fault[0]}", fault[1]
            return None
        case _:
            return "", f"is a {type(value).__name__}; write a number, a string, true, false or a list of these"


def _fault_of_text(text: str, longest: int) -> tuple[str, str] | None:
    if len(text) > longest:
        return "", f"has {len(text)} characters; at most {longest} are allowed"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", f"holds {ascii(text)[:60]}, which is not valid Unicode; write it in UTF-8"
    return None


def _count(value: Any) -> int:
    """Values in a value, itself among them, up to one more than may be; no deeper than it may be nested."""
    total, level = 0, [value]
    for _ in range(MAX_SETTING_DEPTH + 1):
        total += len(level)
        if total > MAX_SETTING_VALUES:
            break
        level = [
            item
            for each in level
            if isinstance(each, list | dict)
            for item in (each if isinstance(each, list) else each.values())
        ]
    return total


def _check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    if _count(settings) > MAX_SETTING_VALUES:
        raise ValueError(f"holds more than {MAX_SETTING_VALUES} values; no method has so many to set")
    for name, value in settings.items():
        if not _SETTING_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!a} is not a setting; write PEFT's own field name in camelCase, such as targetModules")
        if (fault := _fault(value)) is not None:
            raise ValueError(f"{name}{fault[0][:200]}: {fault[1]}")
    return settings


# The length stands first: behind a validator it would not reach the JSON schema, and so not the CRD.
MethodSettings = Annotated[dict[str, Any], Field(max_length=MAX_SETTINGS), AfterValidator(_check_settings)]
"""Fields of PEFT's configuration of a method, in camelCase; numbers with a fraction are strings."""


def is_decimal(text: str) -> bool:
    """Whether a setting's string is a number with a fraction, written as this API asks for it."""
    return len(text) <= LONGEST_DECIMAL and re.fullmatch(DECIMAL_PATTERN, text) is not None


class MethodSpec(ApiModel):
    """How the model is fine-tuned."""

    type: MethodType = MethodType.LORA
    """How the model is trained: all of it (Full), or through an adapter. docs/reference/methods.md has each of them."""
    lora: LoraSpec | None = None
    """Adapter settings; only with LoRA, QLoRA, DoRA and QDoRA."""
    settings: MethodSettings | None = None
    """Settings of the other methods: PEFT's own field names in camelCase, numbers with a fraction as strings, as in
    `{r: 8, alpha: 16, targetModules: [q_proj], moduleDropout: "0.1"}`. Unset: PEFT's defaults, on every linear layer but the
    output head. Preflight checks names and types."""
    quantization: QuantizationSpec | None = None
    """Settings of the quantised base; only with QLoRA and QDoRA."""
