"""Broken inputs are refused, outputs are complete or absent, and memory is bounded whatever the model's size."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from bench.merge.model import write_adapter, write_base
from finetune_trainer.files import FileDigests
from finetune_trainer.merge.chunks import RowChunk
from finetune_trainer.merge.journal import Durable, Journal
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.merge.plan import MergePlan
from finetune_trainer.merge.shard_file import ShardFile
from finetune_trainer.merge.writer import OutputDirectory
from finetune_trainer.verify.tensors import manifest_faults
from finetune_trainer.weights import errors
from finetune_trainer.weights.headers import read_checkpoint
from tests.unit.finetune_trainer.merge import tiny

GIB = 1 << 30


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    base = tiny.save_base(directory / "base", tiny.llama(), torch.bfloat16)
    (base / "tokenizer_config.json").write_text('{"from": "base"}')
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "pytorch_model.bin").write_bytes(b"pickle")
    adapter = tiny.save_adapter(directory / "adapter", base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    return base, adapter


def options(pair: tuple[Path, Path], output: Path, dtype: str | None = None) -> MergeOptions:
    return MergeOptions(pair[0], (pair[1],), output, dtype, GIB)


def test_a_missing_shard_is_refused_before_anything_is_written(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    index = {"weight_map": {"weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "base" / "config.json").write_text("{}")
    with pytest.raises(errors.BrokenCheckpointError, match="model-00001-of-00001"):
        merge_adapter(MergeOptions(tmp_path / "base", (pair[1],), tmp_path / "merged", None, GIB))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_weights_that_the_index_does_not_name_are_left_out_and_reported(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = shutil.copytree(pair[0], tmp_path / "base")
    save_file({"weight": torch.zeros(4)}, base / "vision.safetensors")
    report = merge_adapter(MergeOptions(base, (pair[1],), tmp_path / "merged", None, GIB))
    assert report.left_out == ("vision.safetensors",)
    assert merge_adapter(MergeOptions(base, (pair[1],), tmp_path / "merged", None, GIB)).left_out == ("vision.safetensors",)
    assert f"{base}: not in the merged model, because they are not part of the base: vision.safetensors" in caplog.messages


def test_a_file_with_more_layers_that_no_index_names_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base = shutil.copytree(pair[0], tmp_path / "base")
    known = next(name for name in read_checkpoint(base).tensors if ".layers.0." in name)
    further = known.replace(".layers.0.", ".layers.77.")
    save_file({further: torch.zeros(4)}, base / "b.safetensors")
    with pytest.raises(errors.BrokenCheckpointError, match=rf"b\.safetensors holds tensor {further}, which the index leaves out"):
        merge_adapter(MergeOptions(base, (pair[1],), tmp_path / "merged", None, GIB))
    assert not (tmp_path / "merged").exists()
    # The same weights a second time, or what nobody can read, are no part of the model.
    save_file({known: torch.zeros(4)}, base / "b.safetensors")
    (base / "c.safetensors").write_bytes(b"\xff" * 32)
    (base / "d.safetensors").symlink_to("nowhere.safetensors")
    (base / "e.safetensors").mkdir()
    report = merge_adapter(MergeOptions(base, (pair[1],), tmp_path / "merged", None, GIB))
    assert report.left_out == tuple(f"{name}.safetensors" for name in "bcde")


def test_the_output_loads_alone_and_its_manifest_is_right(pair: tuple[Path, Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = merge_adapter(options(pair, tmp_path / "merged"), lambda done, total: seen.append((done, total)))
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "manifest.json"} <= files
    assert "pytorch_model.bin" not in files
    manifest = json.loads((tmp_path / "merged" / "manifest.json").read_text())
    assert {entry["name"] for entry in manifest["files"]} == files - {"manifest.json"}
    for entry in manifest["files"]:
        content = (tmp_path / "merged" / entry["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["num_bytes"], entry["sha256"])
    assert report.sha256 == {entry["name"]: entry["sha256"] for entry in manifest["files"]}
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == report.bytes_written
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_the_adapters_tokenizer_comes_before_the_bases(pair: tuple[Path, Path], tmp_path: Path) -> None:
    adapter = shutil.copytree(pair[1], tmp_path / "adapter")
    (adapter / "tokenizer_config.json").write_text('{"from": "adapter"}')
    (adapter / "chat_template.jinja").write_text("{{ trained }}")
    (adapter / "additional_chat_templates").mkdir()
    (adapter / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    merge_adapter(MergeOptions(pair[0], (adapter,), tmp_path / "merged", None, GIB))
    assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text()) == {"from": "adapter"}
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "{{ trained }}"
    assert not (tmp_path / "merged" / "tokenizer.json").exists()
    listed = {entry["name"] for entry in json.loads((tmp_path / "merged" / "manifest.json").read_text())["files"]}
    assert "additional_chat_templates/tool_use.jinja" in listed
    (tmp_path / "merged" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ other }}")
    assert list(manifest_faults(tmp_path / "merged", FileDigests())) == [
        "file additional_chat_templates/tool_use.jinja does not have the sha256 of the manifest: it changed after the merge"
    ]


def test_a_second_merge_finds_the_first_and_another_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first = merge_adapter(options(pair, tmp_path / "merged"))
    before = (tmp_path / "merged" / "model.safetensors").stat().st_mtime_ns
    second = merge_adapter(options(pair, tmp_path / "merged"))
    assert not first.was_complete
    assert second.was_complete
    assert second.sha256 == first.sha256
    assert (tmp_path / "merged" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(errors.OutputExistsError, match="other inputs or options"):
        merge_adapter(options(pair, tmp_path / "merged", "float32"))
    os.truncate(tmp_path / "merged" / "model.safetensors", 100)
    with pytest.raises(errors.OutputExistsError, match=r"model\.safetensors"):
        merge_adapter(options(pair, tmp_path / "merged"))


def test_a_foreign_directory_is_never_overwritten(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "thesis.txt").write_text("mine")
    with pytest.raises(errors.OutputExistsError, match="was not written by a merge"):
        merge_adapter(options(pair, tmp_path / "merged"))
    with pytest.raises(errors.MergeError, match="the base directory itself"):
        merge_adapter(options(pair, pair[0]))
    assert (tmp_path / "merged" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_diverged_leaves_no_output(pair: tuple[Path, Path], tmp_path: Path, value: float) -> None:
    adapter = shutil.copytree(pair[1], tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors[name][5, 2] = value
    save_file(tensors, path)
    with pytest.raises(errors.NotFiniteError, match=r"layers\.1\.self_attn\.q_proj"):
        merge_adapter(MergeOptions(pair[0], (adapter,), tmp_path / "merged", None, GIB))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


@pytest.mark.parametrize("is_large", [False, True])
def test_shards_are_filled_and_hashed_at_a_time_with_the_same_bytes(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    def of_shards(output: Path) -> MergeOptions:
        return MergeOptions(pair[0], (pair[1],), output, None, 60_000)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    one_by_one = merge_adapter(of_shards(tmp_path / "one-by-one")).sha256
    assert sum(name.endswith(".safetensors") for name in one_by_one) > 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    writing = threading.Barrier(4)
    seen: set[str] = set()
    original = Journal.record

    def record(self: Journal, file_name: str, durable: Durable) -> None:
        if len(seen) < 4:  # the first four wait for each other, which would never end if one was filled after the other
            seen.add(file_name)
            writing.wait(timeout=30)
        original(self, file_name, durable)

    if is_large:  # each chunk waits until it is alone in memory
        monkeypatch.setattr(RowChunk, "is_large", True)
    else:
        monkeypatch.setattr(Journal, "record", record)
    assert merge_adapter(of_shards(tmp_path / "together")).sha256 == one_by_one


def test_a_shard_that_fails_ends_the_others(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    original = ShardFile.append

    def append(self: ShardFile, pages: memoryview, position: int) -> None:
        if "00002" in self.path.name:
            raise errors.NoSpaceError("full")
        original(self, pages, position)

    monkeypatch.setattr(ShardFile, "append", append)
    with pytest.raises(errors.NoSpaceError, match="full"):
        merge_adapter(MergeOptions(pair[0], (pair[1],), tmp_path / "merged", None, 60_000))
    assert not (tmp_path / "merged").exists()


MEASURE = """
import sys
from pathlib import Path
import torch
from bench.merge.contender import peak_resident_bytes
before = peak_resident_bytes()
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
base, adapter, output = map(Path, sys.argv[1:])
merge_adapter(MergeOptions(base, (adapter,), output, None, 5_000_000_000))
print(peak_resident_bytes() - before)
"""


def test_memory_is_bounded_by_neither_model_nor_its_largest_tensor(tmp_path: Path) -> None:
    base_bytes = write_base(tmp_path / "base", "0.3B wide")
    adapter_bytes = write_adapter(tmp_path / "adapter", "0.3B wide", tmp_path / "base")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "merged")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    assert base_bytes > 600 << 20
    assert int(done.stdout) < (350 << 20) + adapter_bytes


@pytest.mark.parametrize("role", ["base", "adapter"])
def test_what_a_link_leads_to_elsewhere_is_not_in_the_merged_model(pair: tuple[Path, Path], tmp_path: Path, role: str) -> None:
    base, adapter = (Path(shutil.copytree(path, tmp_path / path.name)) for path in pair)
    (adapter / "tokenizer_config.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    link = tmp_path / role / "tokenizer.json"
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(errors.BrokenCheckpointError, match=f"{link}: is a link to {tmp_path}/secret, which is outside"):
        merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, GIB))
    assert not (tmp_path / "merged").exists()
    if role == "base":
        # On a claim that holds both, it is the user's own arrangement.
        (adapter / "tokenizer_config.json").unlink()
        merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, GIB, base_root=tmp_path))
        assert (tmp_path / "merged" / "tokenizer.json").read_text() == "secret"
        assert not (tmp_path / "merged" / "tokenizer.json").is_symlink()


def test_a_base_from_the_cache_of_the_hub_is_merged(pair: tuple[Path, Path], tmp_path: Path) -> None:
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    blobs = Path(shutil.copytree(pair[0], repository / "blobs"))
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    report = merge_adapter(MergeOptions(snapshot, (pair[1],), tmp_path / "merged", None, GIB))
    plain = merge_adapter(options(pair, tmp_path / "plain"))
    assert report.sha256 == plain.sha256


def test_a_link_that_is_turned_while_the_merge_runs_is_not_followed(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(pair[0], tmp_path / "base"))
    (tmp_path / "secret").write_text("secret")

    def turned(opened: OutputDirectory, plan: MergePlan) -> object:
        (base / "tokenizer.json").unlink()
        (base / "tokenizer.json").symlink_to(tmp_path / "secret")
        return before(opened, plan)

    before = OutputDirectory.open_shards
    monkeypatch.setattr(OutputDirectory, "open_shards", turned)
    with pytest.raises(errors.StorageError, match="is a link to"):
        merge_adapter(MergeOptions(base, (pair[1],), tmp_path / "merged", None, GIB))
    copies = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"secret"]
    assert sorted(copies) == ["secret", "tokenizer.json"]


def test_settings_that_are_no_json_are_not_copied(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(pair[0], tmp_path / "base"))
    (base / "generation_config.json").write_text('{"temperature": NaN}')
    with pytest.raises(errors.BrokenCheckpointError, match=r"generation_config.json is not JSON \(NaN is not a value"):
        merge_adapter(MergeOptions(base, (pair[1],), tmp_path / "merged", None, GIB))


def test_what_a_base_has_besides_its_weights_comes_along(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base = shutil.copytree(pair[0], tmp_path / "base")
    # What such a list looks like is not known, so it is copied as it is.
    (base / "modules.json").write_text("[1, NaN,]")
    (base / "video_preprocessor_config.json").write_text("{}")
    (base / "report.json").write_text("{}")
    (base / "modeling_tiny.py").write_text("")
    merge_adapter(MergeOptions(base, (pair[1],), tmp_path / "merged", None, GIB))
    present = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"modules.json", "video_preprocessor_config.json"} <= present
    assert present.isdisjoint({"report.json", "modeling_tiny.py", "pytorch_model.bin"})
    assert (tmp_path / "merged" / "modules.json").read_text() == "[1, NaN,]"


@pytest.mark.parametrize(("excess", "chosen"), [(0, "adapter"), (1, "base")])
def test_a_tokenizer_with_tokens_beyond_the_embeddings_is_not_copied(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, excess: int, chosen: str
) -> None:
    """A padding token that a program has added to the tokenizer alone has no row, and the model would fail on it."""
    adapter = shutil.copytree(pair[1], tmp_path / "adapter")
    last = json.loads((pair[0] / "config.json").read_text())["vocab_size"] - 1 + excess
    (adapter / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": last, "content": "[PAD]"}]}))
    (adapter / "tokenizer_config.json").write_text('{"from": "adapter"}')
    merge_adapter(MergeOptions(pair[0], (adapter,), tmp_path / "merged", None, GIB))
    assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text()) == {"from": chosen}
    assert ("it would fail on the others" in caplog.text) is bool(excess)
