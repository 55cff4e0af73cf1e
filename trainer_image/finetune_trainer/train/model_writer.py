"""A fully fine-tuned model -> safetensors files, one tensor in memory at a time.

Layout, names and index are those of the merge's output (merge/plan.py), which transformers loads like its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from finetune_trainer.checkpoint.load import PieceReader
from finetune_trainer.merge.plan import MergePlan, OutputTensor, shard_layout
from finetune_trainer.model.invariants import check_saved
from finetune_trainer.model.load import SAFETENSORS_DTYPES
from finetune_trainer.model.load_shards import read_into
from finetune_trainer.weights.headers import TensorHeader

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def write_model(
    model: PreTrainedModel,
    trained: PieceReader,
    fixed: Mapping[str, torch.Tensor],
    base: Mapping[str, TensorHeader],
    directory: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Configuration and weights of `model`, which lies on the meta device; stored buffers from `base`.

    `trained`, `fixed`: the parameters. `dtype`: element type of the trained ones in the files; the others keep theirs in `base`.
    Raises InvariantError where a tensor is missing, has another shape or is not finite, CheckpointError, and OSError as the file
    system does.
    """
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in base}
    check_names([*trained.names, *fixed], parameters)
    outputs = [_output(name, shape, base[name].dtype if name in fixed else _NAMES[dtype]) for name, shape in parameters.items()]
    outputs += [_output(name, shape, base[name].dtype) for name, shape in buffers.items()]
    plan = MergePlan(shards=shard_layout(outputs, max_shard_bytes))
    for shard in plan.shards:
        with (directory / shard.file_name).open("wb") as file:
            file.write(shard.header)
            for output in shard.tensors:
                if output.name in parameters:
                    values = fixed[output.name] if output.name in fixed else trained.whole(output.name)
                    tensor = values.to(SAFETENSORS_DTYPES[output.dtype])
                    check_saved({output.name: tensor}, {output.name: parameters[output.name]})
                else:
                    kept = SAFETENSORS_DTYPES[output.dtype]
                    tensor = torch.empty(output.shape, dtype=kept)
                    read_into(base[output.name], 0, tensor.view(-1), kept)
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    index = plan.index()
    if index is not None and plan.index_file is not None:
        (directory / plan.index_file).write_text(json.dumps(index, indent=2) + "\n")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def check_names(found: Iterable[str], expected: Iterable[str]) -> None:
    """The checkpoint holds exactly the model's parameters. Raises InvariantError."""
    # Shapes and values are looked at tensor by tensor; here every name stands for an empty one.
    nothing = torch.empty(0)
    check_saved(dict.fromkeys(found, nothing), dict.fromkeys(expected, (0,)))


def _output(name: str, shape: tuple[int, ...], dtype: str) -> OutputTensor:
    source = TensorHeader(name, dtype, shape, Path(), 0)
    return OutputTensor(name=name, dtype=dtype, shape=shape, source=source, compute_dtype=dtype)
