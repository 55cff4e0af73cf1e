"""An adapter directory -> AdapterHeaders. Reads values only where an adapter says that it holds some of them twice.

With ensure_weight_tying PEFT trains one adapter for both embeddings and writes it twice, as it lies on either. Whether the two
still say the same is in the values alone: PEFT parts them for 16-bit bases without a word (peft tuners/tuners_utils.py,
cast_adapter_dtype).

With trained biases PEFT writes that of a module that is saved whole three times: as the module's own, as `modules_to_save.bias`,
which holds the same, and as `original_module.bias`, which no forward pass reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from finetune_trainer.merge.adapter_names import ADAPTER_PREFIX
from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.weights.errors import AdapterTensorDuplicateError
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, TensorHeader, read_adapter, read_json
from finetune_trainer.weights.read_model import have_same_values
from finetune_trainer.weights.rounding import TORCH_DTYPES
from finetune_trainer.weights.stored import StoredModel

_TRANSPOSED = {"lora_A.weight": "lora_embedding_B", "lora_B.weight": "lora_embedding_A"}
"""Part on the output embeddings -> the one on the input embeddings that it is the transpose of."""


def read_adapter_headers(directory: Path, model: StoredModel) -> AdapterHeaders:
    """model: of the base. Raises BrokenCheckpointError, MergeError."""
    config = read_json(directory / ADAPTER_CONFIG_FILE)
    tensors = read_adapter(directory).tensors
    if config.get("bias", "none") != "none":
        tensors = _without_second_biases(tensors)
    copies = frozenset(_copies(tensors, model)) if config.get("ensure_weight_tying") else frozenset()
    return AdapterHeaders(tensors, config, copies)


def _without_second_biases(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Without what PEFT writes of a bias beside the bias itself. Raises AdapterTensorDuplicateError for a copy that differs."""
    kept = dict(tensors)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".modules_to_save.")
        if part == "bias" and (own := tensors.get(f"{module}.bias")) is not None:
            if not have_same_values(tensor, own):
                raise AdapterTensorDuplicateError(
                    f"adapter tensors {own.name} and {name} are the same bias, but differ. Save the adapter again."
                )
            del kept[name]
            kept.pop(f"{module}.original_module.bias", None)
    return kept


def _copies(tensors: Mapping[str, TensorHeader], model: StoredModel) -> Iterator[str]:
    """Names of the tensors of modules that have the same adapter as the module that they are tied to."""
    for tie in model.ties:
        first, *others = (f"{ADAPTER_PREFIX}{path.rpartition('.')[0]}." for path in tie.paths)
        for prefix in others:
            own = [tensor for name, tensor in tensors.items() if name.startswith(prefix)]
            if own and all(_is_copy(tensor, prefix, first, tensors) for tensor in own):
                yield from (tensor.name for tensor in own)


def _is_copy(tensor: TensorHeader, prefix: str, first: str, tensors: Mapping[str, TensorHeader]) -> bool:
    part = tensor.name.removeprefix(prefix)
    original = tensors.get(first + _TRANSPOSED.get(part, part))
    if original is None or original.dtype != tensor.dtype:
        return False
    return torch.equal(_read(tensor), _read(original).T) if part in _TRANSPOSED else have_same_values(tensor, original)


def _read(tensor: TensorHeader) -> torch.Tensor:
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        data = bytearray(file.read(tensor.num_bytes))
    return torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.dtype]).view(tensor.shape)
