"""Safetensors headers of a base model or an adapter: names, dtypes, shapes and byte positions. Never weights, never pickle.

Invariant: every returned position is inside its file, and a tensor's byte count equals its shape times its dtype, so that later
reads need no further checks. stored.py knows what the tensors mean.
Format: 8 bytes little-endian header length, a JSON header, then the data (https://huggingface.co/docs/safetensors).
"""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.files import OTHER_LAYOUT, SpecialFileError, open_regular
from finetune_trainer.weights.errors import BrokenCheckpointError, MergeError

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes per element of the dtypes that safetensors writes for torch. Sub-byte and scale-only types are refused."""
OUTPUT_DTYPES: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Element types of a merged model: torch's name -> the name in headers."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses larger headers; a larger number here means that the file is something else."""

MAX_JSON_BYTES = 256 << 20
"""Bound of a configuration or an index. A truncated one is no valid JSON."""

MAX_DIMENSIONS = 64
"""Bound of a tensor's dimensions, which is torch's own."""
MAX_FILE_BYTES = 2**63 - 1

_SHARD_NUMBER = re.compile(r"(?P<name>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Number of a layer or an expert in the name of a tensor."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
_PICKLED_ADAPTER = "adapter_model.bin"
ADAPTER_CONFIG_FILE = "adapter_config.json"
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
    """All tensors of a directory, in the order in which they are on disk (file by file, then by offset)."""

    directory: Path
    tensors: Mapping[str, TensorHeader]
    file_bytes: Mapping[str, int]


def read_header(path: Path) -> list[TensorHeader]:
    """Tensors of one safetensors file, by offset. Raises BrokenCheckpointError when file and header disagree."""
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise BrokenCheckpointError(f"{path}: {size} bytes is too short for a safetensors file. Fetch it again.")
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
                f"{path}: tensor {name} has dtype {dtype}, which cannot be merged; known are {sorted(DTYPE_BYTES)}."
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
            f"{path}: tensors end at byte {position} but the file has {size} bytes: it is truncated or has foreign "
            "bytes at its end. Fetch it again."
        )
    return tensors


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object and refuse names that occur twice, of which readers take different ones."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice!r} is there twice")
    return entries


def _constant(name: str) -> float:
    """Decode a constant. Infinity is a limit in some architectures (Mamba's time steps); NaN is never intended."""
    if name == "NaN":
        raise ValueError("NaN is not a value of a setting")
    return float(name)


def _tagged(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse NaN in the form in which transformers writes values that JSON lacks."""
    if value.get("__float__") == "NaN":
        raise ValueError("NaN is not a value of a setting")
    return value


def _is_entry(entry: Any) -> bool:
    """Whether dtype, shape and positions are of the right types, and small enough that a product of them is a number of bytes."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list):
        return False
    if len(shape) > MAX_DIMENSIONS or len(offsets) != len(("begin", "end")):
        return False
    return all(type(number) is int and 0 <= number <= MAX_FILE_BYTES for number in (*shape, *offsets))


def read_checkpoint(directory: Path) -> Checkpoint:
    """Headers of a model directory: one `model.safetensors`, or the shards that its index names.

    Raises BrokenCheckpointError for missing or inconsistent files, and for models that only exist as pickles.
    """
    index_path = directory / INDEX_FILE
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise BrokenCheckpointError(f"{index_path}: holds no weight_map. Fetch the model again.")
        files = sorted(set(weight_map.values()))
    elif (directory / SINGLE_FILE).exists():
        weight_map, files = {}, [SINGLE_FILE]
    else:
        raise BrokenCheckpointError(
            f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there. Only safetensors are read; convert a model "
            "that exists as .bin or .pt files with save_pretrained."
        )
    tensors: dict[str, TensorHeader] = {}
    for file_name in files:
        if Path(file_name).name != file_name:
            raise BrokenCheckpointError(f"{index_path}: {file_name!r} points outside the model directory.")
        for tensor in read_header(directory / file_name):
            if weight_map and weight_map.get(tensor.name) != file_name:
                raise BrokenCheckpointError(
                    f"{directory / file_name}: holds tensor {tensor.name}, which the index places in "
                    f"{weight_map.get(tensor.name)}. Index and shards are of different saves; fetch the model again."
                )
            tensors[tensor.name] = tensor
    _require_all_shards(directory, files)
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise BrokenCheckpointError(f"{index_path}: names tensor {absent[0]}, which is in no shard. Fetch the model again.")
    return Checkpoint(directory, tensors, {name: (directory / name).stat().st_size for name in files})


def _require_all_shards(directory: Path, files: Collection[str]) -> None:
    """Raise BrokenCheckpointError if the index does not name all shards, whose tensors would be missing in the model."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_SHARD_NUMBER.fullmatch, files)):
        numbers.setdefault((match["name"], int(match["count"])), set()).add(int(match["number"]))
    for (_, count), present in numbers.items():
        # Some models count from 0.
        if len(present) < count:
            absent = next(number for number in range(1, count + 1) if number not in present)
            raise BrokenCheckpointError(
                f"{directory / INDEX_FILE}: names {len(present)} of {count} files, number {absent} is not among them. Fetch the "
                "model again."
            )


def unnamed_files(checkpoint: Checkpoint) -> list[str]:
    """Safetensors files beside a model that are no part of it, without a second copy of the model in another layout."""
    others = (path.name for path in checkpoint.directory.glob("*.safetensors") if not path.name.startswith(OTHER_LAYOUT))
    return sorted(name for name in others if name not in checkpoint.file_bytes and name != ADAPTER_FILE)


def require_all_named(checkpoint: Checkpoint, others: Iterable[str]) -> None:
    """Raise BrokenCheckpointError if the index leaves out a file with tensors of the model.

    Such tensors are further layers, whose names differ from known ones only in their numbers. others: files beside the model.
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
                    f"{checkpoint.directory / other}: holds tensor {tensor.name}, which the index leaves out, and with it the "
                    "model. Fetch the model again, or move the file away if it is no part of it."
                )


def read_adapter(directory: Path) -> Checkpoint:
    """Headers of a PEFT adapter directory. Raises BrokenCheckpointError when the safetensors file is missing or empty."""
    path = directory / ADAPTER_FILE
    if not path.exists() and (directory / _PICKLED_ADAPTER).exists():
        convert = f"save_file(load({_PICKLED_ADAPTER!r}, weights_only=True), {ADAPTER_FILE!r}, {{'format': 'pt'}})"
        raise BrokenCheckpointError(
            f"{directory}: {ADAPTER_FILE} is missing, and {_PICKLED_ADAPTER} is a pickle, which is never loaded here. Convert it "
            f'in that directory: python -c "from torch import load; from safetensors.torch import save_file; {convert}"'
        )
    if not path.exists():
        raise BrokenCheckpointError(f"{directory}: {ADAPTER_FILE} is missing. Save the adapter with safe_serialization=True.")
    tensors = {tensor.name: tensor for tensor in read_header(path)}
    if not tensors:
        raise BrokenCheckpointError(
            f"{path}: holds no tensor at all, so nothing was trained or the save gathered nothing from its ranks."
        )
    return Checkpoint(directory, tensors, {ADAPTER_FILE: path.stat().st_size})


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from `path`. Raises MergeError naming the file."""
    try:
        with open_regular(path) as file:
            value = json.loads(file.read(MAX_JSON_BYTES + 1).decode(), parse_constant=_constant, object_hook=_tagged)
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path}: the file is missing. Fetch or save it again.") from error
    except SpecialFileError as error:
        raise BrokenCheckpointError(f"{path}: {error.strerror}. Fetch or save it again.") from error
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{path}: is not JSON ({error}). Fetch or save it again.") from error
    if not isinstance(value, dict):
        raise MergeError(f"{path}: should hold a JSON object, not a {type(value).__name__}.")
    return value
