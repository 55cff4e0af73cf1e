"""PURE. Headers and configurations -> MergePlan: every output tensor, its bytes' place, and where they come from.

Called by run.py, and by verify to know which tensors may differ from the base. Invariants: each adapter tensor is used
exactly once (assignment.py), each base tensor gives exactly one output tensor of the same name and shape, and offsets
within a shard are contiguous. Bytes are computed by arithmetic.py and moved by stream.py.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from finetune_trainer.merge.adapter_settings import adapter_settings
from finetune_trainer.merge.assignment import LowRank, assign
from finetune_trainer.merge.errors import MergeError, UnsupportedBaseError
from finetune_trainer.merge.headers import DTYPE_BYTES, INDEX_FILE, SINGLE_FILE, TensorHeader

OUTPUT_DTYPES: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""`MergeOptions.dtype` -> the name in safetensors headers. None keeps each tensor's dtype."""

_CONVERTIBLE = frozenset({"F64", "F32", "F16", "BF16"})
_WIDER = {frozenset({"F16", "BF16"}): "F32"}


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the merged model. `compute_dtype`: the dtype PEFT would hold the base weight in.

    It is the wider of the base's and the output's dtype, so a merge with another output dtype equals loading the base
    in the wider one, merging with PEFT, and casting: no rounding that was not asked for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorHeader
    compute_dtype: str
    low_rank: LowRank | None
    is_replaced: bool
    offset: int
    """Bytes from the start of the shard file."""

    @property
    def num_bytes(self) -> int:
        return self.source.num_bytes // DTYPE_BYTES[self.source.dtype] * DTYPE_BYTES[self.dtype]

    @property
    def is_changed_by_adapter(self) -> bool:
        return self.low_rank is not None or self.is_replaced


@dataclass(frozen=True)
class Shard:
    """One output file: `header` (length prefix included) and then `tensors` in order, without gaps."""

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
    adapter_tensors: tuple[str, ...]

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    def index(self) -> dict[str, Any] | None:
        """Content of the index file, or None for a single shard."""
        if len(self.shards) == 1:
            return None
        total = sum(tensor.num_bytes for tensor in self.tensors)
        weight_map = {tensor.name: shard.file_name for shard in self.shards for tensor in shard.tensors}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    @property
    def index_file(self) -> str | None:
        return INDEX_FILE if len(self.shards) > 1 else None


def merge_plan(
    *,
    base: Mapping[str, TensorHeader],
    base_config: Mapping[str, Any],
    adapter: Mapping[str, TensorHeader],
    adapter_config: Mapping[str, Any],
    dtype: str | None,
    max_shard_bytes: int,
) -> MergePlan:
    """dtype: None keeps the base's, else a key of OUTPUT_DTYPES. Raises MergeError subclasses naming what is wrong."""
    if dtype is not None and dtype not in OUTPUT_DTYPES:
        raise MergeError(f"dtype {dtype!r} is not one of {sorted(OUTPUT_DTYPES)} (or unset, to keep the base model's).")
    if max_shard_bytes < 1:
        raise MergeError(f"max_shard_bytes is {max_shard_bytes}; it must be positive.")
    if base_config.get("quantization_config"):
        raise UnsupportedBaseError(
            "the base model's config.json has a quantization_config: adding to quantised weights quantises the adapter as "
            "well. Give the original 16-bit model as the base."
        )
    changes = assign(base, adapter, adapter_settings(adapter_config), base_config)
    outputs = []
    for tensor in base.values():
        change = changes.get(tensor.name)
        out_dtype = OUTPUT_DTYPES[dtype] if dtype and tensor.dtype in _CONVERTIBLE else tensor.dtype
        if change and tensor.dtype not in _CONVERTIBLE:
            raise UnsupportedBaseError(
                f"base tensor {tensor.name}: the adapter changes it, but its dtype is {tensor.dtype}. Give the original "
                "16-bit model as the base."
            )
        replacement = change.replacement if change else None
        outputs.append(
            OutputTensor(
                name=tensor.name,
                dtype=out_dtype,
                shape=tensor.shape,
                source=replacement or tensor,
                compute_dtype=_wider(tensor.dtype, out_dtype),
                low_rank=change.low_rank if change else None,
                is_replaced=replacement is not None,
                offset=0,
            )
        )
    return MergePlan(shards=shard_layout(outputs, max_shard_bytes), adapter_tensors=tuple(sorted(adapter)))


def plan_digest(plan: MergePlan, inputs: Mapping[str, str]) -> str:
    """sha256 over all that decides the output: the layout, the arithmetic, and `inputs` (name -> content digest)."""
    layout = [
        [shard.file_name, *([t.name, t.dtype, t.compute_dtype, t.source.name, t.source.dtype, t.source.offset,
                             t.low_rank.scaling if t.low_rank else None,
                             t.low_rank.orientation if t.low_rank else None] for t in shard.tensors)]
        for shard in plan.shards
    ]  # fmt: skip
    text = json.dumps({"layout": layout, "inputs": dict(inputs)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _wider(first: str, second: str) -> str:
    if first == second:
        return first
    pair = frozenset({first, second})
    return _WIDER.get(pair) or max(pair, key=lambda name: DTYPE_BYTES[name])


def shard_layout(outputs: Iterable[OutputTensor], max_shard_bytes: int) -> tuple[Shard, ...]:
    """Fills shards in the base's order, so that both sides are read and written front to back.

    A tensor larger than the limit gets a shard of its own, as in transformers.
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
    # Wider elements first: readers map the file, and a tensor must begin at a multiple of its element size.
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in ordered:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.num_bytes],
        }
        position += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed, offset = [], len(header)
    for tensor in ordered:
        placed.append(replace(tensor, offset=offset))
        offset += tensor.num_bytes
    return Shard(file_name, header, tuple(placed))
