"""Reads safetensors headers of a base model or an adapter: names, dtypes, shapes and byte positions. Reads no weights or pickles.

Every returned position is inside its file, and each tensor has as many bytes as its shape and dtype need, so later reads need no
further checks. stored.py knows what the tensors mean.
Format: 8 bytes little-endian header length, a JSON header, then the data (https://huggingface.co/docs/safetensors).
"""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.files import OTHER_LAYOUT, SpecialFileError, open_regular
from finetune_trainer.weights.adapter_layouts import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    LFS_POINTER,
    foreign_names,
    no_adapter_file,
)
from finetune_trainer.weights.errors import BrokenCheckpointError, MergeError

__all__ = ["ADAPTER_CONFIG_FILE", "ADAPTER_FILE"]

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes per element of each dtype that is read. Types smaller than a byte, and types that only hold scales, are refused."""
OUTPUT_DTYPES: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Element types of a merged model: torch's name -> the name in headers."""

MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, as in the safetensors library. A file that states a larger size has another format."""

MAX_JSON_BYTES = 256 << 20
"""Maximum size of a configuration or an index. Only a part of a larger file is read, and that part is not valid JSON."""

MAX_DIMENSIONS = 64
"""Maximum number of a tensor's dimensions, as in torch."""
MAX_FILE_BYTES = 2**63 - 1
_ALIGNMENT = 8
"""Alignment of tensors in bytes, as in the safetensors library."""

_POINTER = (
    "is a pointer of Git LFS and not the file itself. Run `git lfs pull` in the clone, or fetch the model with `hf download`."
)
_SHARD_NUMBER = re.compile(r"(?P<name>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Pattern for the number of a layer or an expert in a tensor's name."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class TensorHeader:
    """Location of one tensor. `offset` counts bytes from the start of `file`, header included."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a directory in their order on disk: file by file, and by offset in each file."""

    directory: Path
    tensors: Mapping[str, TensorHeader]
    file_bytes: Mapping[str, int]


def read_header(path: Path) -> list[TensorHeader]:
    """Return the tensors of one safetensors file, sorted by offset. Raises BrokenCheckpointError if file and header disagree."""
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise BrokenCheckpointError(f"{path}: {size} bytes is too short for a safetensors file. Fetch it again.")
            if LFS_POINTER.startswith(prefix):
                raise BrokenCheckpointError(f"{path}: {_POINTER}")
            header_bytes = struct.unpack("<Q", prefix)[0]
            if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > size:
                raise BrokenCheckpointError(
                    f"{path}: the header should take {header_bytes} bytes but the file has {size}: it is truncated or "
                    "not a safetensors file. Fetch it again."
                )
            parsed = json.loads(file.read(header_bytes), object_pairs_hook=_with_unique_names)
            if not isinstance(parsed, dict):
                raise BrokenCheckpointError(
                    f"{path}: the header is a JSON {type(parsed).__name__}, not an object. Fetch it again."
                )
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path}: the file is missing. Fetch the model again.") from error
    except SpecialFileError as error:
        raise BrokenCheckpointError(f"{path}: {error.strerror}. Fetch it again.") from error
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{path}: the header is not JSON ({error}). Fetch it again.") from error

    data_start = 8 + header_bytes
    tensors = []
    position = data_start
    entries = [(name, entry) for name, entry in parsed.items() if name != "__metadata__"]
    for name, entry in entries:
        if not _is_entry(entry):
            raise BrokenCheckpointError(f"{path}: the header's entry of tensor {name!r} is malformed. Fetch it again.")
    for name, entry in sorted(entries, key=lambda item: (item[1]["data_offsets"], item[0])):
        dtype = entry["dtype"]
        if dtype not in DTYPE_BYTES:
            raise BrokenCheckpointError(
                f"{path}: tensor {name} has dtype {dtype}, which cannot be merged; the known types are {sorted(DTYPE_BYTES)}."
            )
        begin, end = entry["data_offsets"]
        tensor = TensorHeader(name, dtype, tuple(entry["shape"]), path, data_start + begin)
        if tensor.offset != position or end - begin != tensor.num_bytes:
            raise BrokenCheckpointError(
                f"{path}: tensor {name} ({dtype}, shape {list(tensor.shape)}) should take {tensor.num_bytes} bytes from "
                f"{position}, the header says {end - begin} from {tensor.offset}. Fetch it again."
            )
        position += tensor.num_bytes
        tensors.append(tensor)
    if position != size:
        raise BrokenCheckpointError(
            f"{path}: tensors end at byte {position}, but the file has {size} bytes: it is truncated or has additional bytes at "
            "its end. Fetch it again."
        )
    return tensors


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None) -> bytes:
    """Return the length prefix and the header of a file with these tensors (name, dtype, shape), in order and without gaps."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, but refuse a name that occurs twice, because readers disagree on which entry counts."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice!r} occurs twice")
    return entries


def _constant(name: str) -> float:
    """Decode Infinity, which some architectures use as a limit (Mamba's time steps). Refuse NaN, which is never intended."""
    if name == "NaN":
        raise ValueError("NaN is not a value of a setting")
    return float(name)


def _tagged(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse the object by which transformers encodes NaN, which JSON lacks; return other objects unchanged."""
    if value.get("__float__") == "NaN":
        raise ValueError("NaN is not a value of a setting")
    return value


def _is_entry(entry: Any) -> bool:
    """Whether dtype, shape and positions have the right types, and all numbers are within their limits."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list):
        return False
    if len(shape) > MAX_DIMENSIONS or len(offsets) != len(("begin", "end")):
        return False
    return all(type(number) is int and 0 <= number <= MAX_FILE_BYTES for number in (*shape, *offsets))


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of a model directory: of its `model.safetensors`, or of the shards that its index names.

    Raises BrokenCheckpointError for missing or inconsistent files, and for models that only exist as pickles.
    """
    index_path = directory / INDEX_FILE
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise BrokenCheckpointError(f"{index_path} holds no weight_map. Fetch the model again.")
        files = sorted(set(weight_map.values()))
    elif (directory / SINGLE_FILE).exists():
        weight_map, files = {}, [SINGLE_FILE]
    elif (directory / ADAPTER_CONFIG_FILE).exists():
        named = read_json(directory / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
        raise BrokenCheckpointError(
            f"{directory} is an adapter and not a model. Name its base ({named!r}, as {ADAPTER_CONFIG_FILE} says), or merge the "
            "adapter into it first."
        )
    else:
        raise BrokenCheckpointError(
            f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} exists. Only safetensors are read; convert a model that exists "
            "as .bin or .pt files with save_pretrained."
        )
    tensors: dict[str, TensorHeader] = {}
    for file_name in files:
        if Path(file_name).name != file_name:
            raise BrokenCheckpointError(f"{index_path}: {file_name!r} points outside the model directory.")
        for tensor in read_header(directory / file_name):
            if weight_map and weight_map.get(tensor.name) != file_name:
                raise BrokenCheckpointError(
                    f"{directory / file_name} holds tensor {tensor.name}, which the index places in "
                    f"{weight_map.get(tensor.name)}. Index and shards are of different saves; fetch the model again."
                )
            tensors[tensor.name] = tensor
    _require_all_shards(directory, files)
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise BrokenCheckpointError(f"{index_path} names tensor {absent[0]}, which is in no shard. Fetch the model again.")
    return Checkpoint(directory, tensors, {name: (directory / name).stat().st_size for name in files})


def _require_all_shards(directory: Path, files: Collection[str]) -> None:
    """Raise BrokenCheckpointError unless the index names all shards; the model would lack the tensors of the others."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_SHARD_NUMBER.fullmatch, files)):
        numbers.setdefault((match["name"], int(match["count"])), set()).add(int(match["number"]))
    for (_, count), present in numbers.items():
        # Some models number their files from 0, so only the count is compared.
        if len(present) < count:
            absent = next(number for number in range(1, count + 1) if number not in present)
            raise BrokenCheckpointError(
                f"{directory / INDEX_FILE} names {len(present)} of {count} files, number {absent} is not among them. Fetch the "
                "model again."
            )


def unnamed_files(checkpoint: Checkpoint) -> list[str]:
    """List safetensors files next to a model that it does not use, leaving out a copy of the model in another layout."""
    others = (path.name for path in checkpoint.directory.glob("*.safetensors") if not path.name.startswith(OTHER_LAYOUT))
    return sorted(name for name in others if name not in checkpoint.file_bytes and name != ADAPTER_FILE)


def require_all_named(checkpoint: Checkpoint, others: Iterable[str]) -> None:
    """Raise BrokenCheckpointError if the index leaves out a file with tensors of the model.

    A tensor belongs to the model if its name differs from a known name only in numbers. others: files next to the model.
    """
    kinds = {_NUMBER.sub("N", name) for name in checkpoint.tensors}
    for other in others:
        try:
            header = read_header(checkpoint.directory / other)
        except (MergeError, OSError):  # the model's own files were read without error
            continue
        for tensor in header:
            if tensor.name not in checkpoint.tensors and _NUMBER.sub("N", tensor.name) in kinds:
                raise BrokenCheckpointError(
                    f"{checkpoint.directory / other} holds tensor {tensor.name}, which the index leaves out, so the model would "
                    "lack it. Fetch the model again, or move the file away if it is not part of the model."
                )


def read_adapter(directory: Path) -> Checkpoint:
    """Read the headers of a PEFT adapter directory.

    Raises BrokenCheckpointError if the file is missing, broken or empty, or if it is not in PEFT's layout.
    """
    path = directory / ADAPTER_FILE
    if not path.exists():
        raise BrokenCheckpointError(no_adapter_file(directory))
    tensors = {tensor.name: tensor for tensor in read_header(path)}
    if not tensors:
        raise BrokenCheckpointError(
            f"{path} holds no tensors, so nothing was trained, or nothing was gathered from the ranks when it was saved."
        )
    if (empty := next((name for name, tensor in tensors.items() if tensor.num_bytes == 0), None)) is not None:
        raise BrokenCheckpointError(
            f"{path}: {empty} has no values: DeepSpeed ZeRO-3 or FSDP did not gather it from the ranks when it was saved. Gather "
            "the parameters (zero_to_fp32.py, FULL_STATE_DICT), and save the adapter again."
        )
    if (problem := foreign_names(path, tensors)) is not None:
        raise BrokenCheckpointError(problem)
    return Checkpoint(directory, tensors, {ADAPTER_FILE: path.stat().st_size})


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from `path`. Raises MergeError, which names the file."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if content.startswith(LFS_POINTER):
            raise BrokenCheckpointError(f"{path}: {_POINTER}")
        value = json.loads(content.decode(), parse_constant=_constant, object_hook=_tagged)
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path}: the file is missing. Fetch or save it again.") from error
    except SpecialFileError as error:
        raise BrokenCheckpointError(f"{path}: {error.strerror}. Fetch or save it again.") from error
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{path} is not JSON ({error}). Fetch or save it again.") from error
    if not isinstance(value, dict):
        raise MergeError(f"{path} should hold a JSON object, not a {type(value).__name__}.")
    return value
