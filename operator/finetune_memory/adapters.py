"""Derives the parameters that training holds from the base's: adds PEFT's adapters, marks what is trained, packs weights.

Names follow PEFT's rules (peft/tuners/tuners_utils.py, lora/layer.py), packing those of bitsandbytes (functional.py). Tests
compare the results with real adapters (tests/unit/finetune_memory/test_adapters.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from finetune_job.api.method import ALL_LINEAR, LoraBias, MethodType
from finetune_job.methods import INSIDE_PEFT
from finetune_job.module_expressions import key_expression
from finetune_job.module_names import OUTPUT_HEADS
from finetune_job.plan.element_types import VALUE_BYTES
from finetune_job.plan.method_plan import LoraPlan, MethodPlan, QuantizationPlan
from finetune_memory.model_shape import LINEAR, ParameterShape, UnknownModelError

FIRST_VALUES = "first_values"
"""Name of the frozen adapter that holds the trained adapter's initial values, if these were taken from the base's weights."""
STACKED_EXPERTS: Mapping[str, Mapping[str, tuple[str, int]]] = {
    "mixtral": {"gate": ("gate.weight", 1), "w1": ("gate_up_proj", 2), "w3": ("gate_up_proj", 2), "w2": ("down_proj", 1)},
    "qwen2_moe": {
        "gate": ("gate.weight", 1), "gate_proj": ("gate_up_proj", 2), "up_proj": ("gate_up_proj", 2),
        "down_proj": ("down_proj", 1),
    },
}  # fmt: skip
"""Maps the old name of an expert's layer or of a router to the parameter that PEFT adapts instead and the factor for its rank, in
models whose experts transformers now stacks. Every layer with such a name counts as an expert's, so dense blocks beside the
experts get no adapter (peft/utils/transformers_weight_conversion.py)."""
STACKED_AS: Mapping[str, str] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), "mixtral"),
    **dict.fromkeys((
        "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen3_moe",
        "qwen3_next", "solar_open",
    ), "qwen2_moe"),
}  # fmt: skip
"""Maps a decoder's `model_type` to its entry in STACKED_EXPERTS (transformers' own list, as PEFT reads it)."""
BLOCK_SIZE, NESTED_BLOCK_SIZE = 64, 256
"""Number of values in a 4-bit weight that share a scale, and of scales that share one if the scales are packed as well."""
CODE_BYTES, NESTED_CODE_BYTES, OFFSET_BYTES = 16 * 4, 256 * 4, 4
"""Bytes, in float32, of the code books of 4-bit values and 8-bit scales, and of the mean subtracted from the scales."""


def trained_parameters(
    base: Sequence[ParameterShape], method: MethodPlan, base_dtype: str, model_type: str
) -> tuple[ParameterShape, ...]:
    """List the parameters as the trainer holds them. base_dtype: element type of the base.

    Raises UnknownModelError for methods other than Full, LoRA and its variants.
    """
    if method.type is MethodType.FULL:
        return tuple(replace(parameter, dtype=base_dtype, is_trained=True) for parameter in base)
    if method.lora is None:
        raise UnknownModelError(
            f"spec.method.type: only PEFT itself knows what {method.type.value} adds to a model; preflight estimates it"
        )
    lora = _with_stacked_experts(method.lora, base, model_type)
    adapter_dtype = "float32" if lora.autocast_adapter_dtype and base_dtype != "float32" else base_dtype
    every = tuple(_with_adapters(base, lora, base_dtype, adapter_dtype))
    trained = {parameter.module for parameter in every if parameter.is_trained}
    # The base's trained modules and biases also have adapter_dtype, as does a norm's frozen weight if its bias is trained.
    return tuple(
        replace(parameter, dtype=adapter_dtype)
        if parameter.is_trained or (len(parameter.shape) == 1 and parameter.module in trained)
        else parameter
        for parameter in every
    )


def _with_stacked_experts(lora: LoraPlan, base: Sequence[ParameterShape], model_type: str) -> LoraPlan:
    """Return the settings as PEFT rewrites them before it looks for modules."""
    once = STACKED_EXPERTS.get(STACKED_AS.get(model_type, ""))
    if once is None:
        return lora
    names = lora.target_modules
    if names == (ALL_LINEAR,):
        linear = {parameter.module.rpartition(".")[2] for parameter in base if parameter.kind in LINEAR}
        names = (*sorted(linear - set(OUTPUT_HEADS)), *once)
    stacks = {name: new for name in names for old, new in once.items() if _ends_with(name, old)}
    stacked = dict(stacks.values())
    return lora.model_copy(
        update={
            "target_modules": tuple(dict.fromkeys(name for name in names if name not in stacks)),
            "target_parameters": (*lora.target_parameters, *(name for name in stacked if name not in lora.target_parameters)),
            "rank_pattern": {
                **lora.rank_pattern,
                **{rf".*\.{re.escape(name)}": times * lora.r for name, times in stacked.items() if times > 1},
            },
        }
    )


def _with_adapters(
    base: Sequence[ParameterShape], lora: LoraPlan, base_dtype: str, adapter_dtype: str
) -> Iterator[ParameterShape]:
    modules: dict[str, list[ParameterShape]] = {}
    # The first parameter must be the weight, which shows the layer's kind, but files list a layer's bias before its weight.
    for parameter in sorted(base, key=lambda parameter: parameter.name.endswith(".bias")):
        modules.setdefault(parameter.module, []).append(parameter)
    embeddings = [name for name, parameters in modules.items() if parameters[0].kind == "embedding"]
    head = next((name for name in modules if name.rpartition(".")[2] in OUTPUT_HEADS), None)
    if head is None and embeddings and _ends_with_any(OUTPUT_HEADS[0], (*lora.target_modules, *lora.modules_to_save)):
        # A tied head has no weight of its own, but gets an adapter or a trained copy of its own.
        modules[OUTPUT_HEADS[0]] = [replace(modules[embeddings[0]][0], name=f"{OUTPUT_HEADS[0]}.weight", kind="linear")]
    for name, parameters in modules.items():
        path = INSIDE_PEFT + name
        if any(name.endswith(saved) for saved in lora.modules_to_save):
            if name != OUTPUT_HEADS[0] or head is not None:
                yield from (_renamed(parameter, f"{path}.original_module", base_dtype) for parameter in parameters)
            yield from (
                _renamed(parameter, f"{path}.modules_to_save.default", base_dtype, is_trained=True) for parameter in parameters
            )
            continue
        if embeddings[:1] == [name]:
            rows: Sequence[int] = lora.trainable_token_indices
        else:
            end = name.rpartition(".")[2]
            rows = next((rows for module, rows in lora.separate_token_rows.items() if end == module), ())
        if rows:
            yield from (_renamed(parameter, f"{path}.token_adapter.base_layer", base_dtype) for parameter in parameters)
            tokens = (len(rows), parameters[0].shape[1])
            yield ParameterShape(f"{path}.token_adapter.trainable_tokens_delta.default", tokens, adapter_dtype, is_trained=True)
            continue
        stacked = [parameter for parameter in parameters if _ends_with_any(parameter.name, lora.target_parameters)]
        if stacked:
            yield from (_renamed(parameter, path + ".base_layer" * len(stacked), base_dtype) for parameter in parameters)
            yield from _stacked(path, stacked, lora, adapter_dtype)
            continue
        is_target = _is_target(name, parameters[0], lora, head)
        trains_bias = lora.bias is LoraBias.ALL or (is_target and lora.bias is not LoraBias.NONE)
        if name != OUTPUT_HEADS[0] or head is not None or not is_target:
            inner = f"{path}.base_layer" if is_target else path
            yield from (
                _renamed(parameter, inner, base_dtype, is_trained=trains_bias and parameter.name.endswith(".bias"))
                for parameter in parameters
            )
        if not is_target:
            continue
        for parameter in _adapter(path, parameters[0], lora, adapter_dtype, _rank(name, lora)):
            yield parameter
            if lora.starts_from_base:
                first = parameter.name.replace(".default.", f".{FIRST_VALUES}.")
                yield replace(parameter, name=first, dtype=base_dtype, is_trained=False)


def _renamed(parameter: ParameterShape, module: str, dtype: str, *, is_trained: bool = False) -> ParameterShape:
    return replace(parameter, name=f"{module}.{parameter.name.rpartition('.')[2]}", dtype=dtype, is_trained=is_trained)


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
    """List the adapters of stacked weights. Each adapter wraps the one before it, so the last is the outermost."""
    for number, parameter in enumerate(targets, start=1):
        experts, outputs, inputs = parameter.shape if len(parameter.shape) == 3 else (1, *parameter.shape)
        inner = path + ".base_layer" * (len(targets) - number)
        rank = _rank(parameter.name, lora)
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
    """Return the rank of the first pattern that matches by PEFT's rules, or the default rank.

    Preflight refuses a pattern that does not compile; here such a pattern matches nothing.
    """
    for key, rank in lora.rank_pattern.items():
        with suppress(re.error, RecursionError, OverflowError):
            if re.match(key_expression(key), name):
                return rank
    return lora.r


def quantised(
    parameters: Sequence[ParameterShape], quantization: QuantizationPlan, base_dtype: str, kept: Collection[str] = OUTPUT_HEADS
) -> tuple[tuple[ParameterShape, ...], int]:
    """Pack the weights of linear layers. Return all parameters, and the bytes of the scales, which every rank holds in full.

    kept: last parts of the names of modules that are not packed.
    """
    storage = quantization.quant_storage.value if quantization.quant_storage is not None else base_dtype
    packed_base, constant = [], 0
    for parameter in parameters:
        names = parameter.module.removesuffix(".base_layer").split(".")
        if parameter.kind not in LINEAR or parameter.is_trained or names[-1] in kept:
            packed_base.append(parameter)
            continue
        if quantization.bits == 8:
            packed_base.append(replace(parameter, dtype="int8"))
            constant += parameter.shape[0] * 4
            continue
        packed = -(-parameter.numel // 2)
        packed_base.append(replace(parameter, shape=(-(-packed // VALUE_BYTES[storage]), 1), dtype=storage))
        constant += scale_bytes(parameter.numel, is_nested=quantization.double_quant)
    return tuple(packed_base), constant


def scale_bytes(values: int, *, is_nested: bool) -> int:
    """Return the bytes of the scales and code books of a packed weight with this number of values."""
    scales = -(-values // BLOCK_SIZE)
    if not is_nested:
        return scales * 4 + CODE_BYTES
    return scales + -(-scales // NESTED_BLOCK_SIZE) * 4 + OFFSET_BYTES + CODE_BYTES + NESTED_CODE_BYTES
