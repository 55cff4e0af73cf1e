"""The base model with added tokens: what is in its directory, that it is made once, and what stops a half-made one."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune_job.finding import Finding
from finetune_job.plan.run_plan import AddedTokenPlan
from finetune_trainer.added_tokens import BaseOrder, known_token, read_added_tokens
from finetune_trainer.data.tokenizer_files import FileTokenizer
from finetune_trainer.errors import ModelError
from finetune_trainer.model import base_with_tokens
from finetune_trainer.model.base_with_tokens import answer, make_base_with_tokens
from finetune_trainer.processes.sandbox import SandboxEndedError
from tests.support.cases import table
from tests.support.tiny_model import END, write_tiny_llama

TOKENS = tuple(AddedTokenPlan(content=content, special=special) for content, special in (("<|tool|>", True), ("<step>", False)))
OTHER_WEIGHTS = ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx", "base.gguf")
FINDINGS = TypeAdapter(list[Finding])


def order(tmp_path: Path, tokens: tuple[AddedTokenPlan, ...] = TOKENS, **changes: Any) -> BaseOrder:
    base = tmp_path / "base"
    if not base.exists():
        write_tiny_llama(base, **changes)
    workspace = tmp_path / "workspace"
    return BaseOrder(
        base=base,
        root=base,
        tokens=tokens,
        allow_remote_code=False,
        saved_whole=(),
        target=workspace / "made",
        record=workspace / "added.json",
    )


def test_any_program_can_load_it(tmp_path: Path) -> None:
    """Eight rows are not enough for 257 tokens and eight more."""
    many = (*TOKENS, *(AddedTokenPlan(content=f"<{number}>", special=False) for number in range(6)))
    work = order(tmp_path, many)
    (work.base / "LICENSE").write_text("terms")
    (work.base / "generation_config.json").write_text('{"eos_token_id": 256}')
    for name in OTHER_WEIGHTS:
        (work.base / name).write_text("the base's weights in another form")
    (work.base / ".hidden").write_text("")
    assert make_base_with_tokens(work) == []
    names = {path.name for path in work.target.iterdir()}
    assert names >= {"LICENSE", "generation_config.json", "config.json", "model.safetensors", "tokenizer.json"}
    assert names.isdisjoint({*OTHER_WEIGHTS, ".hidden"})
    tokenizer, before = AutoTokenizer.from_pretrained(work.target), AutoTokenizer.from_pretrained(work.base)
    assert tokenizer("a<|tool|>b<step>", add_special_tokens=False)["input_ids"] == [
        *before("a", add_special_tokens=False)["input_ids"],
        257,
        *before("b", add_special_tokens=False)["input_ids"],
        258,
    ]
    assert tokenizer.decode([257, 258], skip_special_tokens=True) == "<step>"
    assert (AutoConfig.from_pretrained(work.target).vocab_size, AutoConfig.from_pretrained(work.base).vocab_size) == (265, 264)
    model = AutoModelForCausalLM.from_pretrained(work.target)
    assert model(input_ids=torch.tensor([[257, 264]])).logits.shape == (1, 2, 265)
    made = read_added_tokens(work.record)
    assert made is not None
    assert made.id_of == {"<|tool|>": 257, "<step>": 258, **{f"<{number}>": 259 + number for number in range(6)}}
    assert (made.num_rows, made.has_more_rows, made.embedding, made.separate_head) == (265, True, "embed_tokens", "lm_head")
    assert [path.name for path in work.target.parent.iterdir() if "tmp" in path.name] == []


def test_rows_to_spare_are_taken_first(tmp_path: Path) -> None:
    work = order(tmp_path, tie_word_embeddings=True)
    assert make_base_with_tokens(work) == []
    made = read_added_tokens(work.record)
    assert made is not None
    assert (made.ids, made.num_rows, made.has_more_rows, made.separate_head) == ((257, 258), 264, False, None)
    assert AutoConfig.from_pretrained(work.target).vocab_size == 264


def test_what_an_earlier_preflight_made_is_made_again(tmp_path: Path) -> None:
    """Of a base that has been changed since, in whatever file, and of other tokens; of the same it is the same."""
    work = order(tmp_path)
    make_base_with_tokens(work)
    first = {path.name: path.read_bytes() for path in work.target.iterdir()}
    make_base_with_tokens(work)
    assert {path.name: path.read_bytes() for path in work.target.iterdir()} == first
    write_tiny_llama(tmp_path / "other", initializer_range=0.5)
    (tmp_path / "other/model.safetensors").replace(work.base / "model.safetensors")
    (work.base / "generation_config.json").write_text('{"eos_token_id": [5, 256]}')
    tokenizer = AutoTokenizer.from_pretrained(work.base)
    tokenizer.add_tokens(["known"])
    tokenizer.save_pretrained(work.base)
    assert make_base_with_tokens(work) == []
    found = AutoModelForCausalLM.from_pretrained(work.target)
    rows = AutoModelForCausalLM.from_pretrained(work.base).get_input_embeddings().weight[:257]
    assert torch.equal(found.get_input_embeddings().weight[:257], rows)
    assert AutoTokenizer.from_pretrained(work.target).convert_tokens_to_ids("<|tool|>") == 258
    assert found.generation_config.eos_token_id == [5, 256]
    make_base_with_tokens(order(tmp_path, TOKENS[:1]))
    assert "<step>" not in AutoTokenizer.from_pretrained(work.target).get_vocab()


@pytest.mark.parametrize("record", ["a record", "a pipe", "a folder", "nothing"])
def test_what_stands_in_its_place_is_replaced_and_no_link_is_followed(tmp_path: Path, record: str) -> None:
    work = order(tmp_path)
    make_base_with_tokens(work)
    content = work.record.read_bytes()
    if record == "a record":
        work.record.write_text('{"ids": "many"}')
        with pytest.raises(ModelError, match=r"is not preflight's record of spec\.model\.addedTokens"):
            read_added_tokens(work.record)
    else:
        work.record.unlink()
    if record == "a pipe":
        os.mkfifo(work.record)
    elif record == "a folder":
        (work.record / "inside").mkdir(parents=True)
    (outside := tmp_path / "outside").mkdir()
    (outside / "kept").write_text("kept")
    work.target.rename(tmp_path / "away")
    work.target.symlink_to(outside)
    assert make_base_with_tokens(work) == []
    assert work.record.read_bytes() == content
    AutoModelForCausalLM.from_pretrained(work.target)
    assert not work.target.is_symlink()
    assert (outside / "kept").read_text() == "kept"


def test_a_process_that_is_killed_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = order(tmp_path)
    make_base_with_tokens(work)

    def ends(*_arguments: Any, **_named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(base_with_tokens, "write_durably", ends)
    with pytest.raises(KeyboardInterrupt):
        make_base_with_tokens(work)
    assert read_added_tokens(work.record) is None
    leftover = work.target.with_name("made.tmp-123")
    leftover.mkdir()
    monkeypatch.undo()
    assert make_base_with_tokens(work) == []
    assert not leftover.exists()
    assert read_added_tokens(work.record) is not None


def test_a_full_disk_is_told_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = order(tmp_path)
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((*real[:3], 0, 0, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    (found,) = make_base_with_tokens(work)
    assert (found.rule, found.field) == ("claim-too-small", "spec.workspace")
    assert "needs 0.0 GB, 0.0 GB are free" in found.message
    monkeypatch.undo()
    monkeypatch.setattr(base_with_tokens, "limit_memory", lambda: None)

    def no_room(*_arguments: Any, **_named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(base_with_tokens, "write_with_rows", no_room)
    (found,) = FINDINGS.validate_json(answer(work))
    assert (found.rule, found.severity) == ("claim-too-small", "error")
    assert list(work.target.parent.iterdir()) == []

    def broken(*_arguments: Any, **_named: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(base_with_tokens, "write_with_rows", broken)
    with pytest.raises(OSError, match="Input/output error"):
        answer(work)


def test_a_tied_head_that_the_files_hold_apart_is_told(tmp_path: Path) -> None:
    """transformers loads both as they are stored, and ties them, without the head's values, as soon as rows are added."""
    work = order(tmp_path, tie_word_embeddings=False)
    config = work.base / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    model = AutoModelForCausalLM.from_pretrained(work.base)
    head = model.lm_head.weight.detach().clone()
    assert not torch.equal(head, model.model.embed_tokens.weight)
    model.resize_token_embeddings(model.config.vocab_size + 2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    (finding,) = make_base_with_tokens(work)
    assert (finding.rule, finding.field, finding.value) == (
        "added-tokens-without-rows",
        "spec.model.addedTokens",
        "lm_head.weight",
    )
    assert "tie_word_embeddings" in finding.message
    assert finding.fix == (
        "set tie_word_embeddings: false in config.json of the base, if the head is to keep its own values, or else remove "
        "lm_head.weight from its files"
    )
    assert not work.record.exists()
    # The first of the two ways out; the second is that of any tied base.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    assert make_base_with_tokens(work) == []
    made = AutoModelForCausalLM.from_pretrained(work.target)
    assert torch.equal(made.lm_head.weight[:257], head[:257]), "all but the rows to spare that the tokens have taken"


def test_a_link_out_of_the_base_is_not_followed(tmp_path: Path) -> None:
    work = order(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (work.base / "notes.txt").symlink_to(secret)
    with pytest.raises(OSError, match="which is outside"):
        make_base_with_tokens(work)
    assert not work.target.exists()


def test_first_records_are_read_with_the_same_tokens(tmp_path: Path) -> None:
    """By the tokenizer's file alone, as `finetune data` reads it."""
    work = order(tmp_path)
    make_base_with_tokens(work)
    text = "a<|tool|>b <step>c"
    quick = FileTokenizer(work.base, TOKENS)
    assert quick(text)["input_ids"] == AutoTokenizer.from_pretrained(work.target)(text)["input_ids"]
    assert json.loads((work.base / "tokenizer.json").read_text())["added_tokens"] != []
    assert quick.vocabulary()["<step>"] == 258


@pytest.mark.parametrize(("settings", "configured", "stops"), table(__file__, "test_generation_stops_at_a_token_that_ends_turns"))
def test_generation_stops_at_a_token_that_ends_turns(
    tmp_path: Path, settings: dict[str, Any] | None, configured: int | None, stops: list[int]
) -> None:
    """And where it did before: as one file or the other says, or else at the tokenizer's end."""
    tokens = (AddedTokenPlan(content="<|end|of|turn|>", stop=True), AddedTokenPlan(content="<|tool|>"))
    work = order(tmp_path, tokens)
    (work.base / "generation_config.json").unlink()
    config = json.loads((work.base / "config.json").read_text())
    (work.base / "config.json").write_text(json.dumps({**config, "eos_token_id": configured}))
    if settings is not None:
        (work.base / "generation_config.json").write_text(json.dumps(settings))
    assert make_base_with_tokens(work) == []
    written = json.loads((work.target / "generation_config.json").read_text())
    assert written == {**(settings or {}), "eos_token_id": stops}
    assert AutoModelForCausalLM.from_pretrained(work.target).generation_config.eos_token_id == stops


@pytest.mark.parametrize(("content", "number"), [(" ", 220), ("\n", 198), ("a", 64), ("日", None), (" a", None)])
def test_a_token_that_the_vocabulary_writes_otherwise_is_known(tmp_path: Path, content: str, number: int | None) -> None:
    """94 visible bytes of ASCII and 94 more have their own symbols, then come the others: the space is byte 32, a new line 10."""
    tokens = (AddedTokenPlan(content="<step>"), AddedTokenPlan(content=content))
    work = order(tmp_path, tokens)
    found = make_base_with_tokens(work)
    assert [each.rule for each in found] == ([] if number is None else ["added-token-known"])
    base = FileTokenizer(work.base)
    for tokenizer in (base, AutoTokenizer.from_pretrained(work.base)):
        known = known_token(tokens, base.vocabulary(), tokenizer)
        assert (known is None) is (number is None)
        if known is not None:
            assert known.message == f"the tokenizer already has {content!r}, with id {number} (1 such tokens)"
            assert known.changes[0].value == [{"content": "<step>"}]


def rewritten_vocabulary(base: Path, change: Any) -> None:
    path = base / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content["model"]["vocab"])
    path.write_text(json.dumps(content))


def test_a_vocabulary_with_a_gap_gives_no_token_the_id_of_another(tmp_path: Path) -> None:
    """The library counts tokens, and takes that number for the first free id."""
    work = order(tmp_path)
    rewritten_vocabulary(work.base, lambda vocabulary: vocabulary.update({END: 256, "zz": 258}))
    assert sorted(AutoTokenizer.from_pretrained(work.base).get_vocab().values())[-2:] == [256, 258]
    (found,) = make_base_with_tokens(work)
    assert (found.rule, found.value) == ("added-token-not-kept", "<|tool|>")
    assert not work.target.exists()


def test_a_vocabulary_of_a_usual_size_takes_seconds(tmp_path: Path) -> None:
    work, words = order(tmp_path, vocab_size=50_300), {f"w{each}": each for each in range(257, 50_000)}
    rewritten_vocabulary(work.base, lambda vocabulary: vocabulary.update({END: 256, **words}))
    began = time.process_time()
    assert make_base_with_tokens(work) == []
    # Seconds; each token looked up in a vocabulary of its own would take an hour.
    assert time.process_time() - began < 60
    made = read_added_tokens(work.record)
    assert made is not None
    assert (made.num_rows, made.ids[1] - made.ids[0]) == (50_300, 1)


def test_a_tokenizer_that_never_loads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(_work: Any) -> None:
        raise SandboxEndedError("takes more than 300 s of CPU time")

    monkeypatch.setattr(base_with_tokens, "run_sandboxed", ends)
    (found,) = make_base_with_tokens(order(tmp_path))
    assert (found.rule, found.message) == ("tokenizer-unusable", "loading the tokenizer takes more than 300 s of CPU time")


def test_a_tokenizer_that_fails_at_a_token_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that lacks its own unknown token."""

    def fails(*_arguments: Any, **_named: Any) -> int:
        raise ValueError("WordPiece error: Missing [UNK] token from the vocabulary")

    monkeypatch.setattr(base_with_tokens, "known_token", fails)
    work = order(tmp_path)
    (found,) = make_base_with_tokens(work)
    assert (found.rule, found.severity) == ("tokenizer-unusable", "error")
    assert "tokens cannot be added to the tokenizer (ValueError: WordPiece error" in found.message
    assert not work.target.exists()
