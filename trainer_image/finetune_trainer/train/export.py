"""Convert the final checkpoint to the trained adapter or model, in the formats that PEFT and transformers read.

The export reads the checkpoint's files instead of gathering from ranks. So all kinds of sharding take the same path, and exactly
what was verified is exported. Only rank 0 exports. A whole model is written one tensor at a time, in the layout of merge/plan.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

from finetune_job.api.method import MethodType
from finetune_trainer.checkpoint.load import RangeReader, full_parameters
from finetune_trainer.checkpoint.manifest import Manifest
from finetune_trainer.checkpoint.start import origin_of
from finetune_trainer.companion_files import companion_files
from finetune_trainer.context import RunContext
from finetune_trainer.errors import InvariantError
from finetune_trainer.files import (
    CHAT_TEMPLATE_FILE,
    CODE_SUFFIX,
    GENERATION_FILE,
    MANIFEST_FILE,
    TEMPLATES,
    copy_within,
    file_sha256,
    licence_files,
    replacing_directory,
    sync_file,
    tokenizer_files,
    write_durably,
)
from finetune_trainer.inspection.base_name import base_name
from finetune_trainer.merge.plan import MergePlan, OutputTensor, shard_layout
from finetune_trainer.model.adapters import (
    adapter_settings,
    attach,
    fixed_tensors,
    has_first_values,
    plain_lora,
    second_names,
    stored_names,
)
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.invariants import check_saved
from finetune_trainer.model.load import SAFETENSORS_DTYPES, build_on_meta, build_with_lazy_zeros, stored_dtype
from finetune_trainer.model.load_shards import read_into, stored_by_name
from finetune_trainer.release.adapter_check import TENSORS_KEY, tensor_descriptions
from finetune_trainer.weights.base_identity import BASE_KEY
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, ADAPTER_FILE, INDEX_FILE, TensorHeader

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def export(context: RunContext, checkpoint: Path, manifest: Manifest, fixed: Mapping[str, torch.Tensor]) -> str:
    """Write the trained result to the workspace, replacing an earlier one; returns the SHA-256 of its manifest.

    fixed: tensors of the adapter or the model that are not trained, by stored name.
    """
    with replacing_directory(context.workspace.adapter) as directory:
        facts: dict[str, Any] = {"plan_sha256": context.plan_sha256, "step": manifest.step}
        if context.plan.method.type is MethodType.FULL:
            _export_model(context, directory, checkpoint, manifest, fixed)
        else:
            # Describe the tensors in memory, so that the file is later compared with what was trained and not with itself.
            # With added tokens, training had a copy of the base that users do not have.
            facts[BASE_KEY] = None if context.plan.model.added_tokens else origin_of(context).base_sha256
            facts[TENSORS_KEY] = tensor_descriptions(_export_adapter(context, directory, checkpoint, manifest, fixed))
        return _write_manifest(directory, facts)


def _export_adapter(
    context: RunContext, directory: Path, checkpoint: Path, manifest: Manifest, fixed: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Write the adapter; returns its tensors by name."""
    model = attach(build_with_lazy_zeros(context.plan, context.base_model), context.plan)
    names = stored_names(model)
    shapes = {names[name]: tuple(parameter.shape) for name, parameter in model.named_parameters() if name in names}
    tensors = {names[name]: tensor for name, tensor in full_parameters(checkpoint, manifest)}
    check_saved(tensors, shapes)
    if set(fixed) != set(fixed_tensors(model)):
        raise InvariantError(
            f"the adapter's fixed tensors are {sorted(fixed)[:3]}, but PEFT writes {sorted(fixed_tensors(model))[:3]}"
        )
    if has_first_values(model):
        first = _first_values(context.workspace.first_values, manifest)
        tensors |= {name: plain_lora(tensors[name], tensor, name) for name, tensor in first.items()}
    tensors |= {name: tensor.contiguous() for name, tensor in fixed.items()}
    tensors |= {second: tensors[first].clone() for second, first in second_names(model).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    save_file(dict(sorted(tensors.items())), directory / ADAPTER_FILE, metadata={"format": "pt"})
    with safe_open(directory / ADAPTER_FILE, framework="pt") as written:
        # An open file has keys() but is not iterable.
        check_saved({name: written.get_tensor(name) for name in written.keys()}, shapes)  # noqa: SIM118
    settings = adapter_settings(model, base_name(context.plan.model.name, context.base_model), context.plan.model.revision)
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    for path in licence_files(context.base_model):
        copy_within(path, context.base_model_root, directory / path.name)
    for path in tokenizer_files(context.base_model):
        if path.parent == context.base_model and path.suffix != CODE_SUFFIX:
            copy_within(path, context.base_model_root, directory / path.name)
    _write_chat_templates(context, directory)
    return tensors


def _write_chat_templates(context: RunContext, directory: Path) -> None:
    """Write the chat templates used in training: the job's, which tokenizers prefer to any other, or all of the base's."""
    if context.plan.data.chat_template is not None:
        (directory / CHAT_TEMPLATE_FILE).write_text(context.plan.data.chat_template)
        return
    for path in sorted((context.base_model / TEMPLATES).glob("*.jinja")):
        (directory / TEMPLATES).mkdir(exist_ok=True)
        copy_within(path, context.base_model_root, directory / TEMPLATES / path.name)


def _first_values(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return the adapters' first values by stored name. Raises InvariantError if the checkpoint was trained from other values."""
    if file_sha256(path) != manifest.origin.first_values:
        raise InvariantError(f"{path} does not hold the values from which the checkpoint of step {manifest.step} was trained")
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def _export_model(
    context: RunContext, directory: Path, checkpoint: Path, manifest: Manifest, fixed: Mapping[str, torch.Tensor]
) -> None:
    dtype = resolve_dtypes(context.plan, stored_dtype(context.base_model)).save
    model = build_on_meta(context.plan, context.base_model)
    model.config.dtype = dtype
    if (context.base_model / GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(context.base_model)
    headers = None if context.plan.model.allow_remote_code else stored_by_name(model, context.base_model)
    reader, max_shard_bytes = RangeReader(checkpoint, manifest), context.plan.merge.max_shard_bytes
    if headers is None:
        _write_converted(model, reader, fixed, directory, dtype=dtype, max_shard_bytes=max_shard_bytes)
    else:
        write_tensor_by_tensor(model, reader, fixed, headers, directory, dtype=dtype, max_shard_bytes=max_shard_bytes)
    for path in companion_files(context.base_model):
        if path.name != GENERATION_FILE:
            copy_within(path, context.base_model_root, directory / path.name)
    _write_chat_templates(context, directory)


def _write_converted(
    model: PreTrainedModel,
    reader: RangeReader,
    fixed: Mapping[str, torch.Tensor],
    directory: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write a model whose stored tensors differ from its parameters. transformers converts all of them in memory at once."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tensors = {name: reader.whole(name).to(dtype) for name in reader.names}
    tensors |= fixed
    check_saved(tensors, shapes)
    tensors |= _tied(model, tensors)
    model.save_pretrained(directory, state_dict=tensors, max_shard_size=max_shard_bytes)


def _tied(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tied parameters by their additional names, under which `save_pretrained` also looks for them."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: tensors[first_names[id(parameter)]]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in tensors
    }


def _write_manifest(directory: Path, facts: dict[str, Any]) -> str:
    files = {}
    for path in sorted(directory.rglob("*")):
        sync_file(path)
        if path.is_file():
            files[path.relative_to(directory).as_posix()] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    content = json.dumps(facts | {"files": files}, indent=2, sort_keys=True) + "\n"
    write_durably(directory / MANIFEST_FILE, content.encode())
    return file_sha256(directory / MANIFEST_FILE)


def write_tensor_by_tensor(
    model: PreTrainedModel,
    trained: RangeReader,
    fixed: Mapping[str, torch.Tensor],
    base: Mapping[str, TensorHeader],
    directory: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write configuration and weights of `model`, which is on the meta device; stored buffers come from `base`.

    trained, fixed: its parameters. dtype: element type of trained parameters in the files; all others keep that of `base`.
    Raises InvariantError if a tensor is missing, has another shape or is not finite, CheckpointError, OSError.
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
    if index is not None:
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def check_names(stored: Iterable[str], expected: Iterable[str]) -> None:
    """Check that the checkpoint holds exactly the model's parameters. Raises InvariantError."""
    # Shapes and values are checked later, tensor by tensor. Only names matter here, so all get the same empty tensor.
    nothing = torch.empty(0)
    check_saved(dict.fromkeys(stored, nothing), dict.fromkeys(expected, (0,)))


def _output(name: str, shape: tuple[int, ...], dtype: str) -> OutputTensor:
    source = TensorHeader(name, dtype, shape, Path(), 0)
    return OutputTensor(name=name, dtype=dtype, shape=shape, source=source, compute_dtype=dtype)
