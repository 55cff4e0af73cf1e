"""Plans a merge from headers and configurations: every output tensor, the place of its bytes, and their source.

Called by merge_adapter.py, and by verify, which checks that only planned tensors differ from the base. These invariants hold:
each adapter tensor is used (resolve_changes.py); each base tensor becomes one output tensor of the same name and shape, except
for the rows of a resized vocabulary; tied tensors that adapters separate come last; a shard has no gaps. `steps` computes the
bytes, and stream.py moves them.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.merge.changes import Change, Quantization
from finetune_trainer.merge.resolve_changes import resolve_changes
from finetune_trainer.weights.errors import MergeError, UnsupportedBaseError
from finetune_trainer.weights.headers import DTYPE_BYTES, OUTPUT_DTYPES, SINGLE_FILE, TensorHeader, encode_header
from finetune_trainer.weights.stored import StoredModel

_CONVERTIBLE = frozenset({"F64", "F32", "F16", "BF16"})
_WIDER = {frozenset({"F16", "BF16"}): "F32"}


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the merged model.

    `compute_dtype` is the dtype in which PEFT would hold the base weight: the wider of the base's and the output's dtype. So a
    merge into another dtype equals loading the base in the wider dtype, merging with PEFT, and casting once. If transformers
    keeps a module of a float16 model in fp32, so does the merge.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorHeader
    compute_dtype: str
    changes: tuple[tuple[Change, ...], ...] = ()
    """Empty if the source's values are copied. Otherwise one tuple for each matrix (see `matrix_shape`), applied in order."""
    is_replaced: bool = False
    """Whether `source` is an adapter's tensor."""
    offset: int = 0
    """Number of bytes from the start of the shard file."""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, columns) of each matrix of `changes`. A matrix is one expert of a stack, or else the whole tensor."""
        if len(self.shape) == 3 and len(self.changes) == self.shape[0]:
            return self.shape[1], self.shape[2]
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def num_bytes(self) -> int:
        return self.source.num_bytes // DTYPE_BYTES[self.source.dtype] * DTYPE_BYTES[self.dtype]

    @property
    def is_changed_by_adapter(self) -> bool:
        return any(self.changes) or self.is_replaced


@dataclass(frozen=True, eq=False)
class Shard:
    """One output file. It consists of `header`, including the length prefix, and `tensors` in order, without gaps."""

    file_name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class MergePlan:
    """Everything that decides the output's bytes, except the weights themselves."""

    shards: tuple[Shard, ...]
    adapter_tensors: tuple[TensorHeader, ...] = ()
    """Tensors of all adapters, in their order."""
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that change in the merged model -> their new values."""
    num_rows: int | None = None
    """Number of rows of the embeddings if they are larger than the base's; None otherwise."""

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    def index(self) -> dict[str, Any] | None:
        """Return the content of INDEX_FILE, or None for a single shard, which needs no index."""
        if len(self.shards) == 1:
            return None
        total = sum(tensor.num_bytes for tensor in self.tensors)
        weight_map = {tensor.name: shard.file_name for shard in self.shards for tensor in shard.tensors}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def merge_plan(
    *,
    base: Mapping[str, TensorHeader],
    base_config: Mapping[str, Any],
    model: StoredModel,
    adapters: Sequence[AdapterHeaders],
    dtype: str | None,
    max_shard_bytes: int,
    quantized: Mapping[str, Quantization] = MappingProxyType({}),
) -> MergePlan:
    """Plan the merge of adapters into a base.

    base, base_config, model: tensors, config.json and parameters of one checkpoint. adapters: at least one, in the order of the
    merge. dtype: a key of OUTPUT_DTYPES; None keeps the base's dtype. quantized: names of stored base tensors that are quantized
    and dequantized before adapters are added. Raises subclasses of MergeError, which name what is wrong.
    """
    if dtype is not None and dtype not in OUTPUT_DTYPES:
        raise MergeError(f"dtype {dtype!r} is not one of {sorted(OUTPUT_DTYPES)} (or unset, to keep the base model's).")
    if max_shard_bytes < 1:
        raise MergeError(f"max_shard_bytes is {max_shard_bytes}; it must be positive.")
    if base_config.get("quantization_config"):
        raise UnsupportedBaseError(
            "the base model's config.json has a quantization_config: a merge into quantized weights would also quantize the "
            "adapter. Use the original 16-bit model as the base."
        )
    if not adapters:
        raise MergeError("there is no adapter to merge.")
    resolved = resolve_changes(model, base_config, adapters)
    outputs = []
    for name, tensor in (*base.items(), *resolved.added.items()):
        changed = resolved.changed.get(name)
        before = None if changed and changed.is_replaced else quantized.get(name)
        out_dtype = OUTPUT_DTYPES[dtype] if dtype and tensor.dtype in _CONVERTIBLE else tensor.dtype
        if changed and tensor.dtype not in _CONVERTIBLE:
            raise UnsupportedBaseError(
                f"base tensor {name}: the adapter changes it, but its dtype is {tensor.dtype}. Use the original 16-bit model as "
                "the base."
            )
        changes = changed.changes if changed else ()
        if before:
            changes = tuple((before, *matrix) for matrix in changes or ((),))
        outputs.append(
            OutputTensor(
                name=name,
                dtype=out_dtype,
                shape=changed.source.shape if changed else tensor.shape,
                source=changed.source if changed else tensor,
                compute_dtype=_held_dtype(name, tensor.dtype, out_dtype, model) if changed else _wider(tensor.dtype, out_dtype),
                changes=changes,
                is_replaced=changed is not None and changed.is_replaced,
            )
        )
    return MergePlan(
        shards=shard_layout(outputs, max_shard_bytes),
        adapter_tensors=tuple(tensor for adapter in adapters for tensor in adapter.tensors.values()),
        config_changes=resolved.config_changes,
        num_rows=model.num_rows,
    )


def plan_digest(plan: MergePlan, inputs: Mapping[str, str]) -> str:
    """Return a sha256 of everything that decides the output: layout, arithmetic and `inputs` (name -> digest of content)."""
    digest = hashlib.sha256()
    for shard in plan.shards:
        digest.update(shard.file_name.encode())
        for tensor in shard.tensors:
            digest.update(json.dumps(_described(tensor), separators=(",", ":")).encode())
    digest.update(json.dumps([dict(plan.config_changes), dict(inputs)], sort_keys=True, separators=(",", ":")).encode())
    return digest.hexdigest()


def _described(value: Any) -> Any:
    """Return a part of a plan as JSON, without the directories of the inputs."""
    if isinstance(value, TensorHeader):
        return [value.name, value.dtype, value.shape, value.file.name, value.offset]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *(_described(getattr(value, part.name)) for part in dataclasses.fields(value))]
    if isinstance(value, tuple | list):
        return [_described(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _described(item) for key, item in sorted(value.items())}
    return value


def _held_dtype(name: str, stored: str, out: str, model: StoredModel) -> str:
    wider = _wider(stored, out)
    is_held_wide = wider == "F16" and any(part in model.family.held_in_fp32 for part in name.split("."))
    return "F32" if is_held_wide else wider


def _wider(first: str, second: str) -> str:
    if first == second:
        return first
    pair = frozenset({first, second})
    return _WIDER.get(pair) or max(pair, key=lambda name: DTYPE_BYTES[name])


def shard_layout(outputs: Iterable[OutputTensor], max_shard_bytes: int) -> tuple[Shard, ...]:
    """Assign tensors to shards in the base's order, so that files are read and written from front to back.

    A tensor that is larger than the limit gets its own shard, as in transformers.
    """
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in outputs:
        if groups[-1] and filled + tensor.num_bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.num_bytes
    if len(groups) == 1:
        return (_shard(SINGLE_FILE, groups[0]),)
    count = len(groups)
    return tuple(_shard(f"model-{n:05d}-of-{count:05d}.safetensors", group) for n, group in enumerate(groups, start=1))


def _shard(file_name: str, tensors: list[OutputTensor]) -> Shard:
    # Wider elements come first, because readers memory-map the file, and a tensor must begin at a multiple of its element size.
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    header = encode_header(((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered), {"format": "pt"})
    placed, offset = [], len(header)
    for tensor in ordered:
        placed.append(replace(tensor, offset=offset))
        offset += tensor.num_bytes
    return Shard(file_name, header, tuple(placed))
