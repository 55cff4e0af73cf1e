"""Files that disagree with their headers are refused by name."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune_trainer.weights import errors
from finetune_trainer.weights.headers import read_adapter, read_checkpoint, read_header, read_json, unnamed_files


@pytest.mark.parametrize("cut", [1, 1000, "header", "length"])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, cut: int | str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(64, 64)}, path)
    size = path.stat().st_size
    os.truncate(path, {"header": 20, "length": 5}.get(cut, 0) if isinstance(cut, str) else size - cut)
    with pytest.raises(errors.BrokenCheckpointError, match=str(path)):
        read_header(path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(4)}, path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(errors.BrokenCheckpointError, match="additional bytes"):
        read_header(path)


def write_shards(directory: Path, weight_map: dict[str, str], files: dict[str, str] | None = None) -> None:
    """An index, and one file for each of its tensors, or the given files of one tensor each."""
    for tensor, file in (files or weight_map).items():
        save_file({tensor: torch.zeros(4)}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def shard(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "files", "words"),
    [
        ({"weight": shard(1, 1)}, {"other": shard(1, 1)}, "different saves"),
        ({"a": shard(1, 3), "c": shard(3, 3)}, {"a": shard(1, 3), "b": shard(2, 3), "c": shard(3, 3)},
         "names 2 of 3 files, number 2 is not among them"),
        ({"a": shard(1, 2), "b": "vision.safetensors"}, None, "names 1 of 2 files, number 2 is not among them"),
    ],
    ids=["of another save", "leaves out a file", "beside a file without a number"],
)  # fmt: skip
def test_an_index_that_does_not_fit_its_files_is_refused(
    weight_map: dict[str, str], files: dict[str, str] | None, words: str, tmp_path: Path
) -> None:
    write_shards(tmp_path, weight_map, files)
    with pytest.raises(errors.BrokenCheckpointError, match=words):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("weight_map", [{name: shard(n, 3) for n, name in enumerate("abc", 1)}, {"a": "language.safetensors"}])
def test_numbered_and_other_files_are_read(weight_map: dict[str, str], tmp_path: Path) -> None:
    write_shards(tmp_path, weight_map)
    assert set(read_checkpoint(tmp_path).tensors) == set(weight_map)


def header_file(path: Path, header: str) -> Path:
    """A file of this header and eight bytes of data."""
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    return path


@pytest.mark.parametrize(
    "header",
    [
        '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "w": {}}',
        '{"w": {"dtype": "F32", "dtype": "F16", "shape": [2], "data_offsets": [0, 8]}}',
        '{"__metadata__": {}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {}}',
    ],
    ids=["tensor", "part of an entry", "metadata"],
)
def test_a_name_that_is_there_twice_is_refused(tmp_path: Path, header: str) -> None:
    path = header_file(tmp_path / "model.safetensors", header)
    with pytest.raises(errors.BrokenCheckpointError, match="occurs twice"):
        read_header(path)


def test_files_that_the_index_does_not_name_are_listed(tmp_path: Path) -> None:
    for name in ("model", "vision", "adapter_model", "consolidated"):
        save_file({"weight": torch.zeros(4)}, tmp_path / f"{name}.safetensors")
    assert unnamed_files(read_checkpoint(tmp_path)) == ["vision.safetensors"]


def test_a_setting_may_be_without_limit_but_not_without_a_value(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": [0.0, Infinity], "floor": -Infinity}')
    assert read_json(path) == {"time_step_limit": [0.0, float("inf")], "floor": float("-inf")}
    path.write_text('{"rms_norm_eps": NaN}')
    with pytest.raises(errors.BrokenCheckpointError, match="NaN is not a value of a setting"):
        read_json(path)


def test_a_long_header_with_a_name_twice_is_refused_at_once(tmp_path: Path) -> None:
    """A stranger's may have some million names: work that grows with their square would not end."""
    entries = ", ".join(f'"{number}": 0' for number in range(300_000))
    path = header_file(tmp_path / "model.safetensors", f'{{{entries}, "299999": 0}}')
    with pytest.raises(errors.BrokenCheckpointError, match="'299999' occurs twice"):
        read_header(path)


def test_a_pickled_adapter_is_converted_by_the_command_that_its_refusal_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.BrokenCheckpointError, match=r"adapter_model.safetensors is missing. Save the adapter with"):
        read_adapter(tmp_path)
    name = "base_model.model.q.lora_A.weight"
    torch.save({name: torch.ones(2, 3)}, "adapter_model.bin")
    with pytest.raises(errors.BrokenCheckpointError, match=r"adapter_model.bin is a pickle, which is never loaded") as refused:
        read_adapter(tmp_path)
    exec(re.findall(r'python -c "(.*)"', str(refused.value))[0], {})
    assert {each.name: each.shape for each in read_adapter(tmp_path).tensors.values()} == {name: (2, 3)}
