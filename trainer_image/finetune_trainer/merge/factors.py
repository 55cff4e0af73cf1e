"""The factors of one LoRA, rsLoRA or DoRA layer -> the change of the parameter that they adapt, with checked shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_job.methods import INSIDE_PEFT
from finetune_trainer.merge.adapter_settings import AdapterSettings
from finetune_trainer.merge.changes import Addition, LowRank, ModuleMerge, Orientation
from finetune_trainer.weights.errors import (
    AdapterTensorMisshapedError,
    AdapterTensorMissingError,
    AdapterTensorUnknownError,
    UnsupportedAdapterError,
)
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredParameter

CONV1D_MODEL_TYPES = frozenset({"gpt2", "openai-gpt", "decision_transformer", "imagegpt", "clvp"})
"""Model types of transformers 5.23 whose projections are Conv1D, i.e. stored as (in, out) rather than (out, in)."""
TRAINING_DTYPES = frozenset({"F32", "BF16", "F16"})

LayerTensors = Mapping[str, TensorHeader]
"""The tensors of one layer, by the values of adapter_names.FACTOR_PARTS."""


def module_change(
    module: str, found: LayerTensors, weight: StoredParameter, settings: AdapterSettings, model_type: str
) -> LowRank:
    """The change of a Linear's, Conv1D's or Embedding's weight. Raises the AdapterTensor... errors."""
    is_embedding = "lora_embedding_A" in found or "lora_embedding_B" in found
    first, second = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    _require(module, found, {first, second, *_further(settings)})
    a, b = found[first], found[second]
    orientation = Orientation.EMBEDDING if is_embedding else _linear_or_conv1d(a, b, weight.shape, model_type)
    num_out, num_in = weight.shape if orientation is Orientation.LINEAR else weight.shape[::-1]
    rank = settings.rank(module)
    expected = {first: (rank, num_in), second: (num_out, rank), "lora_magnitude_vector": (num_out,), "lora_B.bias": (num_out,)}
    check_shapes(found, expected, f"{weight.path} of shape {list(weight.shape)} at rank {rank}")
    return LowRank(a, b, found.get("lora_magnitude_vector"), settings.scaling(module), orientation)


def bias_change(module: str, found: LayerTensors, bias: StoredParameter | None, settings: AdapterSettings) -> Addition | None:
    """The addition of lora_bias to a module's bias; None without lora_bias. Raises UnsupportedAdapterError if the module has no
    bias.
    """
    trained = found.get("lora_B.bias")
    if trained is None:
        return None
    if bias is None:
        raise UnsupportedAdapterError(
            f"adapter tensor {trained.name}: lora_bias trained a bias, but the base model's {module} has none that it could be "
            "added to. Train with lora_bias: false, or publish the adapter alone (merge.enabled: false)."
        )
    return Addition(trained, settings.scaling(module))


def convolution_changes(
    module: str, found: LayerTensors, base: Mapping[str, TensorHeader], settings: AdapterSettings, config: Mapping[str, Any]
) -> dict[str, ModuleMerge]:
    """Changes of a convolution by its parameters' names; PEFT's own layer merges it. Raises the AdapterTensor... errors."""
    weight = base["weight"]
    _require(module, found, {"lora_A", "lora_B", *_further(settings)})
    rank = settings.rank(module)
    num_out, num_in, *kernel = weight.shape
    if found["lora_A"].shape[1:2] != (num_in,):
        raise UnsupportedAdapterError(
            f"adapter tensor {found['lora_A'].name}: {module} is a convolution in groups, which PEFT merges wrongly or not at "
            "all. Publish the adapter alone (merge.enabled: false)."
        )
    ones = (1,) * len(kernel)
    expected = {
        "lora_A": (rank, num_in, *kernel),
        "lora_B": (num_out, rank, *ones),
        "lora_magnitude_vector": (1, num_out, *ones),
        "lora_B.bias": (num_out,),
    }
    check_shapes(found, expected, f"{weight.name} of shape {list(weight.shape)} at rank {rank}")
    bias_change(module, found, None if "bias" not in base else StoredParameter("", base["bias"].shape, ()), settings)
    changed = ["weight", *(["bias"] if settings.lora_bias else [])]
    tensors = {tensor.name: tensor for tensor in found.values()}
    layer = f"Conv{len(kernel)}d"
    return {name: ModuleMerge(module, layer, name, base, tensors, config) for name in changed}


def check_shapes(found: LayerTensors, expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise AdapterTensorMisshapedError naming the tensor, its shape and the one that fits, if a shape is wrong."""
    for part, tensor in found.items():
        if tensor.shape != expected[part]:
            raise AdapterTensorMisshapedError(
                f"adapter tensor {tensor.name}: shape {list(tensor.shape)}, expected {list(expected[part])} for {where}. The "
                "adapter belongs to another base model or configuration."
            )
        if tensor.dtype not in TRAINING_DTYPES:
            raise AdapterTensorMisshapedError(
                f"adapter tensor {tensor.name}: dtype {tensor.dtype} is not one of {sorted(TRAINING_DTYPES)}, in which adapters "
                "are trained. Save the adapter again."
            )


def _further(settings: AdapterSettings) -> set[str]:
    parts = {"lora_magnitude_vector"} if settings.use_dora else set()
    return parts | ({"lora_B.bias"} if settings.lora_bias else set())


def _require(module: str, tensors: LayerTensors, wanted: set[str]) -> None:
    for part in sorted(wanted - tensors.keys()):
        present = sorted(tensor.name for tensor in tensors.values())
        raise AdapterTensorMissingError(
            f"adapter tensor {INSIDE_PEFT}{module}.{part} is missing, although {present} are there. Save the adapter again."
        )
    for part in sorted(tensors.keys() - wanted):
        raise AdapterTensorUnknownError(
            f"adapter tensor {tensors[part].name}: adapter_config.json does not say that {module} has a {part} (use_dora, "
            "lora_bias). The file and its configuration belong to different adapters."
        )


def _linear_or_conv1d(a: TensorHeader, b: TensorHeader, weight: tuple[int, ...], model_type: str) -> Orientation:
    """Orientation by shape; the model type decides if the weight is square."""
    fits = weight == (b.shape[0] if b.shape else 0, a.shape[-1] if a.shape else 0)
    fits_transposed = weight == (a.shape[-1] if a.shape else 0, b.shape[0] if b.shape else 0)
    if fits and fits_transposed:
        return Orientation.CONV1D if model_type in CONV1D_MODEL_TYPES else Orientation.LINEAR
    return Orientation.CONV1D if fits_transposed else Orientation.LINEAR
