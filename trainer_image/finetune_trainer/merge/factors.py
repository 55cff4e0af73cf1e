"""Turns the factors of one LoRA, rsLoRA or DoRA layer into the change of the adapted parameter, and checks their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_job.methods import INSIDE_PEFT
from finetune_trainer.merge.adapter_settings import AdapterSettings
from finetune_trainer.merge.changes import Addition, LowRank, ModuleMerge, Orientation
from finetune_trainer.weights.errors import AdapterTensorError, UnsupportedAdapterError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredParameter

CONV1D_MODEL_TYPES = frozenset({"gpt2", "openai-gpt", "decision_transformer", "imagegpt", "clvp"})
"""Model types of transformers 5.23 whose projections are Conv1D layers, stored as (in, out) instead of (out, in)."""
TRAINING_DTYPES = frozenset({"F32", "BF16", "F16"})

LayerTensors = Mapping[str, TensorHeader]
"""The adapter's tensors on one layer, by kind (a value of adapter_names.FACTOR_PARTS)."""


def module_change(
    module: str, tensors: LayerTensors, weight: StoredParameter, settings: AdapterSettings, model_type: str
) -> LowRank:
    """Return the change of the weight of a Linear, Conv1D or Embedding. Raises AdapterTensorError."""
    is_embedding = "lora_embedding_A" in tensors or "lora_embedding_B" in tensors
    first, second = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    _require(module, tensors, {first, second, *_further(settings)})
    a, b = tensors[first], tensors[second]
    # The shape shows whether the weight is transposed; for a square weight, the model type decides.
    num_out, num_in = b.shape[0] if b.shape else 0, a.shape[-1] if a.shape else 0
    is_conv1d = weight.shape == (num_in, num_out) and (num_in != num_out or model_type in CONV1D_MODEL_TYPES)
    orientation = Orientation.EMBEDDING if is_embedding else Orientation.CONV1D if is_conv1d else Orientation.LINEAR
    num_out, num_in = weight.shape if orientation is Orientation.LINEAR else weight.shape[::-1]
    rank = settings.rank(module)
    expected = {first: (rank, num_in), second: (num_out, rank), "lora_magnitude_vector": (num_out,), "lora_B.bias": (num_out,)}
    check_shapes(tensors, expected, f"{weight.path} of shape {list(weight.shape)} at rank {rank}")
    return LowRank(a, b, tensors.get("lora_magnitude_vector"), settings.scaling(module), orientation)


def bias_change(module: str, tensors: LayerTensors, bias: StoredParameter | None, settings: AdapterSettings) -> Addition | None:
    """Return what lora_bias adds to a module's bias; None without lora_bias.

    Raises UnsupportedAdapterError if the module has no bias.
    """
    trained = tensors.get("lora_B.bias")
    if trained is None:
        return None
    if bias is None:
        raise UnsupportedAdapterError(
            f"adapter tensor {trained.name}: lora_bias trained a bias, but the base model's {module} has no bias to add it to. "
            "Train with lora_bias: false, or publish the adapter alone (merge.enabled: false)."
        )
    return Addition(trained, settings.scaling(module))


def convolution_changes(
    module: str, tensors: LayerTensors, base: Mapping[str, TensorHeader], settings: AdapterSettings, config: Mapping[str, Any]
) -> dict[str, ModuleMerge]:
    """Return the changes of a convolution by the name of the changed parameter. PEFT's own layer carries them out.

    Raises AdapterTensorError, UnsupportedAdapterError.
    """
    weight = base["weight"]
    _require(module, tensors, {"lora_A", "lora_B", *_further(settings)})
    rank = settings.rank(module)
    num_out, num_in, *kernel = weight.shape
    if tensors["lora_A"].shape[1:2] != (num_in,):
        raise UnsupportedAdapterError(
            f"adapter tensor {tensors['lora_A'].name}: {module} is a convolution with groups, which PEFT merges wrongly or not "
            "at all. Publish the adapter alone (merge.enabled: false)."
        )
    ones = (1,) * len(kernel)
    expected = {
        "lora_A": (rank, num_in, *kernel),
        "lora_B": (num_out, rank, *ones),
        "lora_magnitude_vector": (1, num_out, *ones),
        "lora_B.bias": (num_out,),
    }
    check_shapes(tensors, expected, f"{weight.name} of shape {list(weight.shape)} at rank {rank}")
    bias_change(module, tensors, None if "bias" not in base else StoredParameter("", base["bias"].shape, ()), settings)
    changed = ["weight", *(["bias"] if settings.lora_bias else [])]
    adapter = {tensor.name: tensor for tensor in tensors.values()}
    layer = f"Conv{len(kernel)}d"
    return {name: ModuleMerge(module, layer, name, base, adapter, config) for name in changed}


def check_shapes(tensors: LayerTensors, expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise AdapterTensorError if a tensor does not have the expected shape, or has a dtype in which adapters are not trained."""
    for part, tensor in tensors.items():
        if tensor.shape != expected[part]:
            raise AdapterTensorError(
                f"adapter tensor {tensor.name}: shape {list(tensor.shape)}, expected {list(expected[part])} for {where}. The "
                "adapter belongs to another base model, revision or configuration; use the base that it was trained on."
            )
        if tensor.dtype not in TRAINING_DTYPES:
            raise AdapterTensorError(
                f"adapter tensor {tensor.name}: dtype {tensor.dtype} is not one of {sorted(TRAINING_DTYPES)}, in which adapters "
                "are trained. Save the adapter again."
            )


def _further(settings: AdapterSettings) -> set[str]:
    parts = {"lora_magnitude_vector"} if settings.use_dora else set()
    return parts | ({"lora_B.bias"} if settings.lora_bias else set())


def _require(module: str, tensors: LayerTensors, wanted: set[str]) -> None:
    for part in sorted(wanted - tensors.keys()):
        present = sorted(tensor.name for tensor in tensors.values())
        raise AdapterTensorError(
            f"adapter tensor {INSIDE_PEFT}{module}.{part} is missing, although {present} are there. Save the adapter again."
        )
    for part in sorted(tensors.keys() - wanted):
        raise AdapterTensorError(
            f"adapter tensor {tensors[part].name}: adapter_config.json does not say that {module} has a {part} (use_dora, "
            "lora_bias). The file and its configuration belong to different adapters."
        )
