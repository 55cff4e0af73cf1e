"""PURE. Adapter tensor names -> the base tensors they change. Every adapter tensor is used exactly once, or it is an error.

In: headers and settings. Out: one Change per base tensor that differs from the base model. Called by plan.py.
PEFT's names: `base_model.model.<module>.lora_A.weight` and so on; `<module>.base_layer.<parameter>` and
`<module>.<parameter>` hold whole parameters (embeddings, biases, modules_to_save).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from finetune_job.api.method import ALL_LINEAR
from finetune_trainer.merge.adapter_settings import AdapterSettings
from finetune_trainer.merge.errors import (
    AdapterTensorDuplicateError,
    AdapterTensorMisshapedError,
    AdapterTensorMissingError,
    AdapterTensorUnknownError,
    TiedWeightsError,
    UnsupportedAdapterError,
)
from finetune_trainer.merge.headers import TensorHeader

ADAPTER_PREFIX = "base_model.model."
CONV1D_MODEL_TYPES = frozenset({"gpt2", "openai-gpt", "decision_transformer", "imagegpt", "clvp"})
"""Model types of transformers 5.23 whose projections are Conv1D, i.e. stored as (in, out) rather than (out, in)."""
INPUT_EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "tokens_embed"})
OUTPUT_EMBEDDINGS = frozenset({"lm_head", "embed_out", "output"})
"""Last name of the modules that transformers ties to each other in causal language models."""

_LOW_RANK_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


class Orientation(StrEnum):
    """How B@A, of shape (out, in), lies on the stored weight."""

    LINEAR = "Linear"  # weight (out, in)
    CONV1D = "Conv1D"  # weight (in, out): transposed
    EMBEDDING = "Embedding"  # weight (num_embeddings, dim): transposed, and rounded before it is added


@dataclass(frozen=True)
class LowRank:
    """W += scaling * B@A, with `magnitude` rescaled as DoRA does. a: (r, in), b: (out, r), magnitude: one per output."""

    a: TensorHeader
    b: TensorHeader
    magnitude: TensorHeader | None
    scaling: float
    orientation: Orientation


@dataclass(frozen=True)
class Change:
    """What the adapter does to one base tensor: first `replacement` if there is one, then `low_rank`."""

    base: TensorHeader
    replacement: TensorHeader | None = None
    low_rank: LowRank | None = None


def assign(
    base: Mapping[str, TensorHeader],
    adapter: Mapping[str, TensorHeader],
    settings: AdapterSettings,
    base_config: Mapping[str, Any],
) -> dict[str, Change]:
    """Changes by base tensor name. Raises one of the AdapterTensor... errors, TiedWeightsError or UnsupportedAdapterError."""
    is_tied = _embeddings_are_tied(base, base_config)
    replacements: dict[str, TensorHeader] = {}
    parts: dict[str, dict[str, TensorHeader]] = {}
    for name, tensor in adapter.items():
        module, part = _split(name)
        if is_tied and module.rpartition(".")[2] in INPUT_EMBEDDINGS | OUTPUT_EMBEDDINGS:
            raise TiedWeightsError(
                f"adapter tensor {name}: input and output embeddings are tied in this model (tie_word_embeddings), so "
                f"changing {module} alone cannot be written down. Untie them before training, or drop {module} from "
                "target_modules and modules_to_save."
            )
        if "lora_" not in part:
            target = _base_name(base, f"{module}.{part}", name)
            if not _may_be_whole(module, part, settings):
                raise AdapterTensorUnknownError(
                    f"adapter tensor {name}: adapter_config.json does not say that {module}.{part} is trained "
                    "(modules_to_save, bias). The file and its configuration belong to different adapters."
                )
            _claim(replacements, target, tensor)
        elif part in _LOW_RANK_PARTS:
            if _EXPERT.search(f".{module}."):
                raise UnsupportedAdapterError(
                    f"adapter tensor {name}: adapters on single experts of a mixture of experts are fused by "
                    "transformers 5 when they are loaded and cannot be merged exactly. Publish the adapter alone."
                )
            _base_name(base, f"{module}.weight", name)
            _claim(parts.setdefault(module, {}), _LOW_RANK_PARTS[part], tensor)
        else:
            raise AdapterTensorUnknownError(f"adapter tensor {name}: {part} is no part of a LoRA, rsLoRA or DoRA adapter.")

    _require_all_targets(base, base_config, settings, set(parts))
    changes = {name: Change(base[name], replacement=tensor) for name, tensor in replacements.items()}
    transposed = _conv1d_evidence(base, parts, base_config)
    for module, found in parts.items():
        target = _base_name(base, f"{module}.weight", module)
        low_rank = _low_rank(module, found, base[target], settings, transposed)
        changes[target] = Change(base[target], replacements.get(target), low_rank)
    for change in changes.values():
        if change.replacement is not None and change.replacement.shape != change.base.shape:
            raise AdapterTensorMisshapedError(
                f"adapter tensor {change.replacement.name}: shape {list(change.replacement.shape)} does not fit "
                f"{change.base.name} of shape {list(change.base.shape)}. If the vocabulary was resized in training, "
                "give the resized model as the base."
            )
    return changes


def _split(name: str) -> tuple[str, str]:
    """Adapter tensor name -> (module inside the base model, the part within the module)."""
    if not name.startswith(ADAPTER_PREFIX):
        raise AdapterTensorUnknownError(f"adapter tensor {name}: PEFT's names begin with {ADAPTER_PREFIX!r}.")
    path = name.removeprefix(ADAPTER_PREFIX)
    match = re.fullmatch(r"(.+?)\.((?:lora_|base_layer\.|token_adapter\.|modules_to_save\.).+)", path)
    module, part = match.groups() if match else path.rpartition(".")[::2]
    part = part.removeprefix("base_layer.")
    if not module or not part or part.startswith(("token_adapter.", "modules_to_save.")) or ".lora_" in f".{module}":
        raise AdapterTensorUnknownError(f"adapter tensor {name}: is not named as PEFT saves LoRA adapters.")
    return module, part


def _base_name(base: Mapping[str, TensorHeader], wanted: str, adapter_name: str) -> str:
    """The checkpoint's name for a parameter. Some checkpoints (gpt2) leave out the first part, `transformer.`."""
    without_first = wanted.partition(".")[2]
    for candidate in (wanted, without_first):
        if candidate in base:
            return candidate
    raise AdapterTensorUnknownError(
        f"adapter tensor {adapter_name}: the base model has no tensor {wanted}. The adapter was trained on another model "
        "or another revision; give that one as the base."
    )


def _may_be_whole(module: str, part: str, settings: AdapterSettings) -> bool:
    if part == "bias" and (settings.bias == "all" or (settings.bias == "lora_only" and settings.targets(module))):
        return True
    is_embedding = module.rpartition(".")[2] in INPUT_EMBEDDINGS | OUTPUT_EMBEDDINGS  # saved by save_embedding_layers
    return is_embedding or settings.is_saved_whole(module)


def _claim(owners: dict[str, TensorHeader], key: str, tensor: TensorHeader) -> None:
    if key in owners:
        raise AdapterTensorDuplicateError(
            f"adapter tensors {owners[key].name} and {tensor.name} both change the same thing. Save the adapter again."
        )
    owners[key] = tensor


def _embeddings_are_tied(base: Mapping[str, TensorHeader], base_config: Mapping[str, Any]) -> bool:
    """What config.json says; where an old one is silent, no stored output embedding means that it is tied."""
    stated = base_config.get("tie_word_embeddings", (base_config.get("text_config") or {}).get("tie_word_embeddings"))
    if stated is not None:
        return bool(stated)
    return not any(name.split(".")[-2:-1] and name.split(".")[-2] in OUTPUT_EMBEDDINGS for name in base)


def _require_all_targets(
    base: Mapping[str, TensorHeader], base_config: Mapping[str, Any], settings: AdapterSettings, adapted: set[str]
) -> None:
    """A targeted module without adapter tensors means that the save lost some (a rank's part under FSDP, say)."""
    if not settings.targets_all_layers or settings.target_modules == ALL_LINEAR:
        return
    # A first part that the checkpoint leaves out is given back, so that names compare with PEFT's.
    num_layers = base_config.get("num_hidden_layers", base_config.get("n_layer"))
    first_parts = {module.partition(".")[0] for module in adapted}
    for name, tensor in base.items():
        module, _, parameter = name.rpartition(".")
        # transformers 5 fuses the experts that checkpoints store one by one, so their names say nothing about modules.
        is_expert = _EXPERT.search(f".{name}") is not None
        if parameter != "weight" or len(tensor.shape) != 2 or is_expert or settings.is_saved_whole(module):
            continue
        candidates = {module} | {f"{first}.{module}" for first in first_parts}
        numbers = _LAYER_NUMBER.findall(f"{module}.")
        is_extra_layer = num_layers is not None and any(int(number) >= num_layers for number in numbers[:1])
        if settings.targets(module) and not candidates & adapted and not is_extra_layer:
            raise AdapterTensorMissingError(
                f"the adapter holds no tensor for {module}, although target_modules {list(settings.target_modules)!r} "
                "covers it: the adapter was saved incompletely. Save it again from all ranks."
            )


def _conv1d_evidence(
    base: Mapping[str, TensorHeader], parts: Mapping[str, Mapping[str, TensorHeader]], base_config: Mapping[str, Any]
) -> bool:
    """True when the model's projections are Conv1D; needed only for square weights, whose shape does not tell."""
    if base_config.get("model_type") in CONV1D_MODEL_TYPES:
        return True
    for module, found in parts.items():
        if {"a", "b"} <= found.keys() and found["a"].name.endswith("lora_A.weight"):
            out_and_in = (found["b"].shape[:1] + found["a"].shape[1:2]) if found["b"].shape else ()
            weight = base[_base_name(base, f"{module}.weight", module)].shape
            if weight == out_and_in[::-1] != out_and_in:
                return True
    return False


def _low_rank(
    module: str, found: Mapping[str, TensorHeader], base: TensorHeader, settings: AdapterSettings, transposed: bool
) -> LowRank:
    wanted = ("a", "b", "magnitude") if settings.use_dora else ("a", "b")
    labels = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector"}
    for part in wanted:
        if part not in found:
            present = sorted(tensor.name for tensor in found.values())
            raise AdapterTensorMissingError(
                f"adapter tensor {ADAPTER_PREFIX}{module}.{labels[part]} is missing, although {present} are there. "
                "Save the adapter again."
            )
    if "magnitude" in found and not settings.use_dora:
        raise AdapterTensorUnknownError(
            f"adapter tensor {found['magnitude'].name}: a DoRA magnitude, but adapter_config.json has use_dora: false."
        )
    a, b, magnitude = found["a"], found["b"], found.get("magnitude")
    if "lora_embedding" in a.name:
        orientation = Orientation.EMBEDDING
    else:
        square = len(base.shape) == 2 and base.shape[0] == base.shape[1]
        looks_transposed = base.shape == (a.shape[-1], b.shape[0]) if b.shape and a.shape else False
        orientation = Orientation.CONV1D if looks_transposed and (transposed or not square) else Orientation.LINEAR
    rank = settings.rank(module)
    rows, columns = base.shape if len(base.shape) == 2 else (0, 0)
    num_out, num_in = (rows, columns) if orientation is Orientation.LINEAR else (columns, rows)
    expected: dict[TensorHeader, tuple[int, ...]] = {a: (rank, num_in), b: (num_out, rank)}
    if magnitude is not None:
        expected[magnitude] = (num_out,)
    for tensor, shape in expected.items():
        if tensor.shape != shape:
            raise AdapterTensorMisshapedError(
                f"adapter tensor {tensor.name}: shape {list(tensor.shape)}, expected {list(shape)} for {base.name} of shape "
                f"{list(base.shape)} at rank {rank}. The adapter belongs to another base model or configuration."
            )
        if tensor.dtype not in ("F32", "BF16", "F16"):
            raise AdapterTensorMisshapedError(f"adapter tensor {tensor.name}: dtype {tensor.dtype} is not a training dtype.")
    return LowRank(a, b, magnitude, settings.scaling(module), orientation)
