"""Base parameters -> parameters while training: what PEFT adds for the kinds of LoRA, what is trained, and 4-bit packing.

The rules of names are PEFT's (peft/tuners/tuners_utils.py, lora/layer.py), those of packing bitsandbytes' (functional.py).
Checked against the real adapters (tests/unit/finetune_memory/test_adapters.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from finetune_job.api.method import ALL_LINEAR, LoraBias, MethodType
from finetune_job.methods import INSIDE_PEFT
from finetune_job.module_expressions import key_expression
from finetune_job.module_names import OUTPUT_HEADS
from finetune_job.plan.element_types import VALUE_BYTES
from finetune_job.plan.method_plan import LoraPlan, MethodPlan, QuantizationPlan
from finetune_memory.model_shape import LINEAR, ParameterShape, UnknownModelError

FIRST_VALUES = "first_values"
"""Name of the frozen adapter that holds what an adapter started with, where that is a part of the base's weights."""
STACKED_EXPERTS: Mapping[str, Mapping[str, tuple[str, int]]] = {
    "mixtral": {"gate": ("gate.weight", 1), "w1": ("gate_up_proj", 2), "w3": ("gate_up_proj", 2), "w2": ("down_proj", 1)},
    "qwen2_moe": {
        "gate": ("gate.weight", 1), "gate_proj": ("gate_up_proj", 2), "up_proj": ("gate_up_proj", 2),
        "down_proj": ("down_proj", 1),
    },
}  # fmt: skip
"""Names of the layers that experts and routers once were -> the parameters that PEFT adapts in their place, in models of which
transformers has stacked the experts since, and how many times the rank these get. Whatever has such a name counts as one of an
expert: dense blocks next to the experts get no adapter (peft/utils/transformers_weight_conversion.py)."""
STACKED_AS: Mapping[str, str] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), "mixtral"),
    **dict.fromkeys((
        "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen3_moe",
        "qwen3_next", "solar_open",
    ), "qwen2_moe"),
}  # fmt: skip
"""By `model_type`: transformers' table of decoders whose experts are stacked alike, as PEFT reads it."""
BLOCK_SIZE, NESTED_BLOCK_SIZE = 64, 256
"""Values of a 4-bit weight that share a scale, and scales that share one where they are packed themselves."""
CODE_BYTES, NESTED_CODE_BYTES, OFFSET_BYTES = 16 * 4, 256 * 4, 4
"""Code books of 4-bit values and of 8-bit scales in float32, and the mean that was taken from the scales."""


def trained_parameters(
    base: Sequence[ParameterShape], method: MethodPlan, held: str, model_type: str
) -> tuple[ParameterShape, ...]:
    """Parameters as the trainer holds them. `held`: element type of the base. Raises UnknownModelError for PEFT's other
    methods.
    """
    if method.type is MethodType.FULL:
        return tuple(replace(each, dtype=held, is_trained=True) for each in base)
    if method.lora is None:
        raise UnknownModelError(
            f"spec.method.type: what {method.type.value} adds to a model only PEFT itself can tell; preflight estimates it"
        )
    lora = _with_stacked_experts(method.lora, base, model_type)
    adapter_dtype = "float32" if lora.autocast_adapter_dtype and held != "float32" else held
    every = tuple(_with_adapters(base, lora, held, adapter_dtype))
    trained = {each.module for each in every if each.is_trained}
    # Modules and biases of the base that are trained, too, and the frozen weight of a normalisation next to a trained bias.
    return tuple(
        replace(each, dtype=adapter_dtype) if each.is_trained or (len(each.shape) == 1 and each.module in trained) else each
        for each in every
    )


def _with_stacked_experts(lora: LoraPlan, base: Sequence[ParameterShape], model_type: str) -> LoraPlan:
    """The names as PEFT rewrites them before it looks for them."""
    once = STACKED_EXPERTS.get(STACKED_AS.get(model_type, ""))
    if once is None:
        return lora
    names = lora.target_modules
    if names == (ALL_LINEAR,):
        linear = {each.module.rpartition(".")[2] for each in base if each.kind in LINEAR}
        names = (*sorted(linear - set(OUTPUT_HEADS)), *once)
    found = {name: new for name in names for old, new in once.items() if _ends_with(name, old)}
    stacked = dict(found.values())
    return lora.model_copy(
        update={
            "target_modules": tuple(dict.fromkeys(name for name in names if name not in found)),
            "target_parameters": (*lora.target_parameters, *(name for name in stacked if name not in lora.target_parameters)),
            "rank_pattern": {
                **lora.rank_pattern,
                **{rf".*\.{re.escape(name)}": times * lora.r for name, times in stacked.items() if times > 1},
            },
        }
    )


def _with_adapters(base: Sequence[ParameterShape], lora: LoraPlan, held: str, adapter_dtype: str) -> Iterator[ParameterShape]:
    modules: dict[str, list[ParameterShape]] = {}
    # Files name a layer's bias before its weight, which says what the layer is.
    for each in sorted(base, key=lambda each: each.name.endswith(".bias")):
        modules.setdefault(each.module, []).append(each)
    embeddings = [name for name, parameters in modules.items() if parameters[0].kind == "embedding"]
    head = next((name for name in modules if name.rpartition(".")[2] in OUTPUT_HEADS), None)
    if head is None and embeddings and _ends_with_any(OUTPUT_HEADS[0], (*lora.target_modules, *lora.modules_to_save)):
        # A tied head holds no weight of its own, but an adapter or a trained copy of its own.
        modules[OUTPUT_HEADS[0]] = [replace(modules[embeddings[0]][0], name=f"{OUTPUT_HEADS[0]}.weight", kind="linear")]
    for name, parameters in modules.items():
        path = INSIDE_PEFT + name
        if any(name.endswith(saved) for saved in lora.modules_to_save):
            if name != OUTPUT_HEADS[0] or head is not None:
                yield from (_held(each, f"{path}.original_module", held) for each in parameters)
            yield from (_held(each, f"{path}.modules_to_save.default", held, is_trained=True) for each in parameters)
            continue
        rows = _token_rows(lora, name, is_embedding=embeddings[:1] == [name])
        if rows:
            yield from (_held(each, f"{path}.token_adapter.base_layer", held) for each in parameters)
            tokens = (len(rows), parameters[0].shape[1])
            yield ParameterShape(f"{path}.token_adapter.trainable_tokens_delta.default", tokens, adapter_dtype, is_trained=True)
            continue
        stacked = [each for each in parameters if _ends_with_any(each.name, lora.target_parameters)]
        if stacked:
            yield from (_held(each, path + ".base_layer" * len(stacked), held) for each in parameters)
            yield from _stacked(path, stacked, lora, adapter_dtype)
            continue
        trains_bias = lora.bias is LoraBias.ALL
        if _is_target(name, parameters[0], lora, head):
            adapts_bias = lora.bias is not LoraBias.NONE
            if name != OUTPUT_HEADS[0] or head is not None:
                yield from (
                    _held(each, f"{path}.base_layer", held, is_trained=adapts_bias and each.name.endswith(".bias"))
                    for each in parameters
                )
            for each in _adapter(path, parameters[0], lora, adapter_dtype, _rank(name, lora)):
                yield each
                if lora.starts_from_base:
                    first = each.name.replace(".default.", f".{FIRST_VALUES}.")
                    yield replace(each, name=first, dtype=held, is_trained=False)
        else:
            yield from (_held(each, path, held, is_trained=trains_bias and each.name.endswith(".bias")) for each in parameters)


def _token_rows(lora: LoraPlan, name: str, *, is_embedding: bool) -> Sequence[int]:
    """That are trained of this module."""
    if is_embedding:
        return lora.trainable_token_indices
    return next((rows for module, rows in lora.separate_token_rows.items() if name.rpartition(".")[2] == module), ())


def _held(each: ParameterShape, module: str, dtype: str, *, is_trained: bool = False) -> ParameterShape:
    return replace(each, name=f"{module}.{each.name.rpartition('.')[2]}", dtype=dtype, is_trained=is_trained)


def _adapter(path: str, weight: ParameterShape, lora: LoraPlan, dtype: str, rank: int) -> Iterator[ParameterShape]:
    outputs, inputs = weight.shape
    if weight.kind == "embedding":
        yield ParameterShape(f"{path}.lora_embedding_A.default", (rank, outputs), dtype, is_trained=True)
        yield ParameterShape(f"{path}.lora_embedding_B.default", (inputs, rank), dtype, is_trained=True)
        outputs = inputs
    else:
        if weight.kind == "transposed":
            outputs, inputs = inputs, outputs
        yield ParameterShape(f"{path}.lora_A.default.weight", (rank, inputs), dtype, is_trained=True)
        yield ParameterShape(f"{path}.lora_B.default.weight", (outputs, rank), dtype, is_trained=True)
    if lora.use_dora:
        yield ParameterShape(f"{path}.lora_magnitude_vector.default.weight", (outputs,), dtype, is_trained=True)


def _stacked(path: str, targets: Sequence[ParameterShape], lora: LoraPlan, dtype: str) -> Iterator[ParameterShape]:
    """Adapters of weights that are no layer's: each wraps the one before it, so the last is the outermost."""
    for number, each in enumerate(targets, start=1):
        experts, outputs, inputs = each.shape if len(each.shape) == 3 else (1, *each.shape)
        inner = path + ".base_layer" * (len(targets) - number)
        rank = _rank(each.name, lora)
        yield ParameterShape(f"{inner}.lora_A.default.weight", (rank * experts, inputs), dtype, is_trained=True)
        yield ParameterShape(f"{inner}.lora_B.default.weight", (outputs, rank * experts), dtype, is_trained=True)


def _is_target(name: str, weight: ParameterShape, lora: LoraPlan, head: str | None) -> bool:
    if weight.kind == "other" or _ends_with_any(name, lora.exclude_modules):
        return False
    if lora.target_modules == (ALL_LINEAR,):
        if weight.kind not in LINEAR or name == head:
            return False
    elif not _ends_with_any(name, lora.target_modules):
        return False
    if lora.layers_to_transform is None:
        return True
    layer = re.match(r".*\.[^.]*\.(\d+)\.", name)
    return layer is not None and int(layer.group(1)) in lora.layers_to_transform


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _ends_with_any(name: str, endings: Collection[str]) -> bool:
    return any(_ends_with(name, ending) for ending in endings)


def _rank(name: str, lora: LoraPlan) -> int:
    return next((rank for key, rank in lora.rank_pattern.items() if _matches(key, name)), lora.r)


def _matches(key: str, name: str) -> bool:
    """As PEFT matches it. One that does not compile is refused by preflight, and estimated as if it stood for nothing."""
    try:
        return re.match(key_expression(key), name) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def quantised(
    parameters: Sequence[ParameterShape], quantization: QuantizationPlan, held: str, kept: Collection[str] = OUTPUT_HEADS
) -> tuple[tuple[ParameterShape, ...], int]:
    """Parameters with the weights of linear layers packed, and the bytes of their scales, which no rank shares with another.

    `kept`: last names of modules that stay as they are: the output head.
    """
    storage = quantization.quant_storage.value if quantization.quant_storage is not None else held
    found, constant = [], 0
    for each in parameters:
        names = each.module.removesuffix(".base_layer").split(".")
        if each.kind not in LINEAR or each.is_trained or names[-1] in kept:
            found.append(each)
            continue
        if quantization.bits == 8:
            found.append(replace(each, dtype="int8"))
            constant += each.shape[0] * 4
            continue
        packed = -(-each.numel // 2)
        found.append(replace(each, shape=(-(-packed // VALUE_BYTES[storage]), 1), dtype=storage))
        constant += scale_bytes(each.numel, is_nested=quantization.double_quant)
    return tuple(found), constant


def scale_bytes(values: int, *, is_nested: bool) -> int:
    """Scales of one packed weight of so many values, with its code books."""
    scales = -(-values // BLOCK_SIZE)
    if not is_nested:
        return scales * 4 + CODE_BYTES
    return scales + -(-scales // NESTED_BLOCK_SIZE) * 4 + OFFSET_BYTES + CODE_BYTES + NESTED_CODE_BYTES
