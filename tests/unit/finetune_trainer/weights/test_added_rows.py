"""Rows for added tokens in the files of a model: their values, what stays as it was, and what is refused."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from finetune_trainer.weights import added_rows
from finetune_trainer.weights.added_rows import link_or_copy, vocabulary_of, write_with_rows, written_bytes
from finetune_trainer.weights.errors import BrokenCheckpointError, UnsupportedBaseError
from finetune_trainer.weights.families import ModelFamily
from finetune_trainer.weights.headers import read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model
from finetune_trainer.weights.stored import StoredModel
from tests.support.tiny_model import write_tiny_llama

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def grown(model: Path, target: Path, *, num_known: int = 257, added: tuple[int, ...], num_rows: int) -> dict[str, torch.Tensor]:
    """The tensors of the copy of `model` in `target`."""
    checkpoint = read_checkpoint(model)
    vocabulary = vocabulary_of(read_stored_model(checkpoint, read_json(model / "config.json")), saved_whole=())
    target.mkdir()
    write_with_rows(checkpoint, model, target, vocabulary, num_known=num_known, added=added, num_rows=num_rows)
    read_checkpoint(target)
    return {name: tensor for path in target.glob("*.safetensors") for name, tensor in load_file(path).items()}


def stored(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 2560, 1 << 20])
def test_a_new_row_is_the_mean_of_all_known_tokens(
    tmp_path: Path, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows to spare are the tokens', too; what is no row of an added token keeps its bits."""
    monkeypatch.setattr(added_rows, "BLOCK_BYTES", block)
    model = write_tiny_llama(tmp_path / "model", dtype)
    made = grown(model, tmp_path / "grown", added=(257, 262, 263, 264, 265), num_rows=266)
    before = stored(model)
    assert set(made) == set(before)
    for name, tensor in before.items():
        if name not in (EMBEDDING, HEAD):
            assert torch.equal(made[name], tensor), name
            continue
        mean = tensor[:257].double().mean(dim=0)
        assert made[name].shape == (266, 32)
        assert made[name].dtype == dtype
        kept = [*range(257), 258, 259, 260, 261]
        assert torch.equal(made[name][kept], tensor[kept])
        for row in (257, 262, 263, 264, 265):
            torch.testing.assert_close(made[name][row], mean.to(dtype), rtol=0, atol=torch.finfo(dtype).eps * 1e-2)


def test_the_mean_is_added_up_in_64_bits(tmp_path: Path) -> None:
    """Values of which a sum in 16 or 32 bits loses the small ones."""
    model = write_tiny_llama(tmp_path / "model")
    tensors = stored(model)
    tensors[EMBEDDING] = torch.ones(264, 32)
    tensors[EMBEDDING][0] = 2.0**24
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    made = grown(model, tmp_path / "grown", added=(264,), num_rows=265)
    assert made[EMBEDDING][264, 0] == torch.tensor((2.0**24 + 256) / 257, dtype=torch.float32)


def test_shards_without_embeddings_are_the_models_own_and_others_are_whole(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "one")
    model = tmp_path / "model"
    LlamaForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(model, max_shard_size="40KB")
    before, index = stored(model), json.loads((model / "model.safetensors.index.json").read_text())
    made = grown(model, tmp_path / "grown", added=(264, 265), num_rows=266)
    assert {name for name in before if not torch.equal(before[name], made[name][: before[name].shape[0]])} == set()
    after = json.loads((tmp_path / "grown" / "model.safetensors.index.json").read_text())
    assert after["weight_map"] == index["weight_map"]
    assert after["metadata"]["total_size"] == index["metadata"]["total_size"] + 2 * 2 * 32 * 4
    assert after["metadata"]["total_parameters"] == index["metadata"]["total_parameters"] + 2 * 2 * 32
    changed = {index["weight_map"][name] for name in (EMBEDDING, HEAD)}
    same = {path.name for path in model.glob("*.safetensors") if path.samefile(tmp_path / "grown" / path.name)}
    assert len(same) >= 1
    assert same == {path.name for path in model.glob("*.safetensors")} - changed
    for name in changed:
        with (tmp_path / "grown" / name).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            assert json.loads(file.read(length))["__metadata__"] == {"format": "pt"}
        assert length % 8 == 0


def test_what_cannot_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise OSError(18, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    with source.open("rb") as file:
        link_or_copy(file, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"weights"
    assert not source.samefile(tmp_path / "copy")


def test_the_room_that_is_needed_is_that_of_what_is_written(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "one")
    model = tmp_path / "model"
    LlamaForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(model, max_shard_size="40KB")
    checkpoint = read_checkpoint(model)
    vocabulary = vocabulary_of(read_stored_model(checkpoint, read_json(model / "config.json")), saved_whole=())
    needed = written_bytes(checkpoint, vocabulary, 270, tmp_path)
    target = tmp_path / "grown"
    target.mkdir()
    write_with_rows(checkpoint, model, target, vocabulary, num_known=257, added=range(264, 270), num_rows=270)
    written = sum(path.stat().st_size for path in target.glob("*.safetensors") if path.stat().st_nlink == 1)
    # Of the headers' lengths alone it knows nothing.
    assert abs(needed - written) < 64
    elsewhere = [path for path in (Path("/dev/shm"), Path("/proc")) if path.stat().st_dev != model.stat().st_dev]
    all_bytes = sum(checkpoint.file_bytes.values()) + 2 * 6 * 32 * 4
    assert written_bytes(checkpoint, vocabulary, 270, elsewhere[0]) == all_bytes


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_needs_no_rows_of_its_own(tmp_path: Path, tied: bool) -> None:
    model = write_tiny_llama(tmp_path / "model", tie_word_embeddings=tied)
    checkpoint = read_checkpoint(model)
    found = vocabulary_of(read_stored_model(checkpoint, read_json(model / "config.json")), saved_whole=())
    assert (found.embedding, found.separate_head) == ("embed_tokens", None if tied else "lm_head")
    assert set(found.tensors) == ({EMBEDDING} if tied else {EMBEDDING, HEAD})
    assert found.num_rows == 264


def with_tensors(tmp_path: Path, changes: dict[str, torch.Tensor | None], family: ModelFamily | None = None) -> StoredModel:
    model = write_tiny_llama(tmp_path / "model")
    tensors = stored(model) | {name: each for name, each in changes.items() if each is not None}
    tensors = {name: each for name, each in tensors.items() if changes.get(name, each) is not None}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = read_json(model / "config.json")
    if family is not None:
        return StoredModel(read_checkpoint(model).tensors, config, family)
    return read_stored_model(read_checkpoint(model), config)


@pytest.mark.parametrize(
    ("saved_whole", "is_refused"),
    [((), True), (("embed_tokens",), True), (("head",), True), (("embed_tokens", "lm_head"), False), (None, False)],
)
def test_a_bias_with_a_value_for_each_token_is_refused_for_adapters_that_do_not_hold_it(
    tmp_path: Path, saved_whole: tuple[str, ...] | None, is_refused: bool
) -> None:
    model = with_tensors(tmp_path, {"lm_head.bias": torch.zeros(264)})
    if is_refused:
        with pytest.raises(UnsupportedBaseError, match=r"lm_head\.bias has a value for each token, and an adapter"):
            vocabulary_of(model, saved_whole=saved_whole)
    else:
        assert set(vocabulary_of(model, saved_whole=saved_whole).tensors) == {EMBEDDING, HEAD, "lm_head.bias"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({HEAD: torch.zeros(300, 32)}, r"lm_head\.weight has 300 rows and model\.embed_tokens\.weight 264"),
        ({EMBEDDING: torch.zeros(264, 32, dtype=torch.int8)}, "has the element type I8, for which no mean can be computed"),
        ({EMBEDDING: torch.zeros(0, 32), HEAD: torch.zeros(0, 32)}, r"\.weight holds no value"),
        ({EMBEDDING: torch.zeros(264, 0), HEAD: torch.zeros(264, 0)}, r"\.weight holds no value"),
        ({EMBEDDING: None}, "no input embedding with a known name"),
    ],
    ids=["head of another size", "another element type", "no rows", "no columns", "no embedding"],
)
def test_embeddings_to_which_no_row_can_be_added_are_refused(
    changes: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedBaseError, match=words):
        vocabulary_of(with_tensors(tmp_path, changes), saved_whole=())


def test_a_file_that_ends_early_is_reported(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    checkpoint = read_checkpoint(model)
    vocabulary = vocabulary_of(read_stored_model(checkpoint, read_json(model / "config.json")), saved_whole=())
    (tmp_path / "grown").mkdir()
    file = model / "model.safetensors"
    whole = checkpoint.tensors[HEAD].offset + 100
    content = file.read_bytes()
    file.write_bytes(content[:whole])
    with pytest.raises(BrokenCheckpointError):
        write_with_rows(checkpoint, model, tmp_path / "grown", vocabulary, num_known=257, added=(264,), num_rows=265)
