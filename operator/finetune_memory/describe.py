"""Describes a model on disk, from config.json if the model's family is known, otherwise from the headers of its weight files."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune_job.added_rows import AddedRows, with_added_rows_trained
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.finding import Finding
from finetune_job.module_names import OUTPUT_HEADS, TOKEN_EMBEDDINGS, is_embedding, is_router
from finetune_job.plan.element_types import VALUE_BYTES, resolve_elements
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.adapters import quantised, trained_parameters
from finetune_memory.families import PARAMETERS_BY_TYPE, base_parameters, layer_class
from finetune_memory.layers import layer_names
from finetune_memory.model_shape import Kind, ModelShape, ParameterShape, UnknownModelError, facts_of, text_config
from finetune_memory.packed_experts import experts_not_packed, packing
from finetune_memory.sharding import unit_names

CONFIG_FILE = "config.json"
HEADER_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header; the safetensors library refuses larger ones."""
MAX_CONFIG_BYTES = 16 << 20
GATE, DOWN = ("gate_proj", "w1"), ("down_proj", "w2")
EXPERT = re.compile(r"\.experts\.\d+\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
"""Matches the name of a single expert's weight in the files of models whose experts transformers stacks."""


@dataclass(frozen=True)
class ModelMetadata:
    """A model as its files describe it: its settings, and the tensors of its weight files if these files are at hand."""

    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Maps the name of each tensor to its element type, as the header names it, and its shape."""

    @property
    def stored(self) -> str:
        """The element type of most bytes in the weight files; if there are no such files, the type in config.json, or float32."""
        sizes: Counter[str] = Counter()
        for dtype, shape in self.tensors.values():
            if dtype in HEADER_DTYPES:
                element_type = HEADER_DTYPES[dtype]
                sizes[element_type] += math.prod(shape) * VALUE_BYTES[element_type]
        if sizes:
            return sizes.most_common(1)[0][0]
        named = self.config.get("dtype") or self.config.get("torch_dtype") or text_config(self.config).get("dtype")
        return str(named) if named in HEADER_DTYPES.values() else "float32"


def read_model(path: Path) -> ModelMetadata:
    """Read a model's directory, or its config.json alone. Raises UnknownModelError."""
    directory = path if path.is_dir() else None
    file = path / CONFIG_FILE if directory is not None else path
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise UnknownModelError(f"{file}: too large for a configuration; give the config.json of a transformers model")
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnknownModelError(f"{file} cannot be read ({reason}); give a model's directory or its config.json") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UnknownModelError(f"{file} names no model_type; give the config.json of a transformers model")
    if config.get("is_encoder_decoder") is True:
        raise UnknownModelError(
            f"{file}: model_type {config['model_type']!r} has an encoder and a decoder, which this product does not train; give "
            "a model that continues a text (decoder-only), such as a Llama, Qwen or Mistral"
        )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for weights in sorted(directory.glob("*.safetensors")) if directory is not None else ():
        tensors.update(_header(weights))
    return ModelMetadata(config, tensors)


def _header(path: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header would take {length} bytes")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, (str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnknownModelError(f"{path} is not a safetensors file ({reason}); copy it again") from error


def number_of_weights(path: Path) -> int:
    """Count the values of a model's own parameters, without adapters. Raises UnknownModelError."""
    files = read_model(path)
    return sum(parameter.numel for parameter in _base(files, files.stored))


def experts_told(plan: RunPlan, path: Path) -> Finding | None:
    """Return a warning if QLoRA leaves the model's experts unpacked. Raises UnknownModelError."""
    if plan.method.quantization is None:
        return None
    files = read_model(path)
    dtype = resolve_elements(plan, files.stored).load
    base = _base(files, dtype)
    packed, _ = quantised(base, plan.method.quantization, dtype)
    return experts_not_packed(plan.method, packing(base, packed), dtype)


def model_shape(plan: RunPlan, files: ModelMetadata) -> ModelShape:
    """Describe the model as the plan trains it. Raises UnknownModelError if only the libraries know its structure."""
    base_dtype = resolve_elements(plan, files.stored).load
    base = _base(files, base_dtype)
    facts = facts_of(files.config, is_stored_otherwise=any(EXPERT.search(name) for name in files.tensors) or None)
    method, num_rows, num_added = plan.method, facts.vocabulary_size, len(plan.model.added_tokens)
    if num_added:
        # Add one row for each added token. Only preflight, which reads the tokenizer, knows whether the embedding has spare rows.
        base = tuple(_with_rows(parameter, num_rows, num_added) for parameter in base)
        ends = [parameter.module.rpartition(".")[2] for parameter in base]
        embedding = next((end for end in ends if end in TOKEN_EMBEDDINGS), None)
        head = next((end for end in ends if end in OUTPUT_HEADS), None)
        if embedding is not None:
            ids = tuple(range(num_rows, num_rows + num_added))
            added = AddedRows(ids, embedding, head or OUTPUT_HEADS[0], has_separate_head=head is not None)
            method = with_added_rows_trained(method, added)
    parameters = trained_parameters(base, method, base_dtype, str(files.config["model_type"]))
    fsdp = plan.parallelism.fsdp
    layers = layer_names(parameters)
    if fsdp.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP and fsdp.transformer_layer_cls_to_wrap is not None:
        own = layer_class(files.config)
        if fsdp.transformer_layer_cls_to_wrap != (own,):
            raise UnknownModelError(
                "spec.parallelism.fsdp.transformerLayerClsToWrap: only preflight knows which modules are of the class "
                f"{', '.join(fsdp.transformer_layer_cls_to_wrap)}; leave it unset" + (f" or name {own}" if own else "")
            )
    return ModelShape(parameters, unit_names(parameters, fsdp, layers), replace(facts, vocabulary_size=num_rows + num_added))


def _with_rows(parameter: ParameterShape, num_rows: int, num_added: int) -> ParameterShape:
    is_head = parameter.module.rpartition(".")[2] in OUTPUT_HEADS
    if parameter.shape[:1] == (num_rows,) and (is_head or parameter.kind == "embedding"):
        return replace(parameter, shape=(num_rows + num_added, *parameter.shape[1:]))
    return parameter


def _base(files: ModelMetadata, base_dtype: str) -> tuple[ParameterShape, ...]:
    if files.config["model_type"] in PARAMETERS_BY_TYPE or not files.tensors:
        return base_parameters(files.config, base_dtype)
    # transformers ignores layers beyond `num_hidden_layers`, which serve multi-token prediction.
    count = files.config.get("num_hidden_layers")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (_, shape) in files.tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None or not isinstance(count, int) or int(layer[1]) < count:
            shapes[name] = shape
    stacked = _stacked(shapes).items()
    return tuple(ParameterShape(name, shape, base_dtype, is_trained=False, kind=_kind(name, shape)) for name, shape in stacked)


def _stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Stack the weights of single experts as transformers does while loading: gate and up in one tensor, down in another."""
    stacked: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        expert = EXPERT.search(name)
        if expert is None or len(shape) != 2:
            stacked[name] = shape
            continue
        is_down = expert["projection"] in DOWN
        stack = f"{name[: expert.start()]}.experts.{'down_proj' if is_down else 'gate_up_proj'}"
        count, rows, columns = stacked.get(stack, (0, 0, 0))
        if is_down:
            stacked[stack] = (count + 1, *shape)
        elif expert["projection"] in GATE:
            stacked[stack] = (count + 1, rows or shape[0], columns or shape[1])
        else:
            stacked[stack] = (count, 2 * shape[0], shape[1])
    return stacked


def _kind(name: str, shape: tuple[int, ...]) -> Kind:
    """Guess the kind of a weight by its name and dimensions: matrices are linear layers, except embeddings and routers."""
    module = name.rpartition(".")[0]
    if len(shape) != 2 or not name.endswith(".weight"):
        return "other"
    if is_embedding(module):
        return "embedding"
    return "other" if is_router(module) else "linear"
