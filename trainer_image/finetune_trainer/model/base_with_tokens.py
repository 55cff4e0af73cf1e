"""Writes the base model with the job's added tokens to a directory on the workspace, which any program can load.

All later steps read that directory instead of the base: rehearsal, training, merge and verification know nothing of added tokens.
`python -m finetune_trainer.model.base_with_tokens` makes it for preflight, which does not import torch: it reads the order from
standard input and writes the findings to standard output.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.added_tokens import FIELD, AddedTokens, BaseOrder, known_token, remove_made
from finetune_trainer.data.render_chat import Tokenizer
from finetune_trainer.data.tokenizer import generation_stops, load_tokenizer, unusable
from finetune_trainer.errors import NO_SPACE
from finetune_trainer.files import (
    GENERATION_FILE,
    copy_within,
    publish_directory,
    sync_directory,
    sync_file,
    temporary_beside,
    tokenizer_files,
    write_durably,
)
from finetune_trainer.processes.sandbox import SandboxEndedError, limit_memory, run_sandboxed
from finetune_trainer.processes.start import die_with, end
from finetune_trainer.weights.added_rows import Vocabulary, vocabulary_of, write_with_rows, written_bytes
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.families import TIE_FIELD, vocabulary_settings
from finetune_trainer.weights.headers import CONFIG_FILE, Checkpoint, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model
from finetune_trainer.weights.stored import StoredModel

log = logging.getLogger(__name__)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ot", ".onnx", ".index.json")
"""Suffixes of weight files. They are not copied, because they hold weights without the added tokens."""
_PROBES = ("def name(value):\n    return 1", "  Zwei Wörter, 12 345!", "<|im_start|>user\n", "日本語 и русский")
"""Texts that must give the same tokens as before, unless they contain an added token."""


FINDINGS = TypeAdapter(list[Finding])


def answer(order: BaseOrder) -> bytes:
    """Return the findings of `make_base_with_tokens` as JSON; raises the same exceptions. Call this in a separate process."""
    # The tokenizer's files are untrusted.
    limit_memory()
    try:
        findings = make_base_with_tokens(order)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        findings = [_too_small(order.target, f"the claim is full ({error.strerror})")]
    return FINDINGS.dump_json(findings)


def make_base_with_tokens(order: BaseOrder) -> list[Finding]:
    """Make the directory; return findings that say why it cannot be made. The directory of an earlier preflight is replaced,
    because the base's weights and tokenizer may have changed since then.

    Raises OSError.
    """
    remove_made(order.record, order.target)
    order.target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(order.target)
    temporary.mkdir()
    try:
        try:
            made = _make(order, temporary)
        except MergeError as error:
            made = _finding("added-tokens-without-rows", order.base.name, str(error), "give a base that has the tokens already")
        if isinstance(made, Finding):
            return [made]
        publish_directory(temporary, order.target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    write_durably(order.record, made.model_dump_json().encode())
    return []


def _make(order: BaseOrder, directory: Path) -> AddedTokens | Finding:
    """Make the base with tokens. Raises MergeError if the weights cannot be read as required."""
    checkpoint, config = read_checkpoint(order.base), read_json(order.base / CONFIG_FILE)
    stored = read_stored_model(checkpoint, config)
    vocabulary = vocabulary_of(stored, saved_whole=order.saved_whole)
    if problem := _two_heads(stored, config):
        return problem
    _copy_other_files(order, checkpoint, directory)
    try:
        added = _add_to_tokenizer(order, directory)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a library reads a user's file; every error is about that file
        added = unusable(order.base, f"tokens cannot be added to the tokenizer ({type(error).__name__}: {str(error)[:500]})")
    if isinstance(added, Finding):
        return added
    ids, num_known, tokenizer = added
    num_rows = max(vocabulary.num_rows, 1 + max(ids))
    if problem := _no_room(checkpoint, vocabulary, num_rows, directory):
        return problem
    if num_rows > vocabulary.num_rows:
        content = json.dumps({**config, **vocabulary_settings(config, num_rows)}, indent=2)
        (directory / CONFIG_FILE).write_text(content + "\n")
    if stops := [number for token, number in zip(order.tokens, ids, strict=True) if token.stop]:
        _stop_at(stops, tokenizer, order.base, directory)
    write_with_rows(checkpoint, order.root, directory, vocabulary, num_known=num_known, added=ids, num_rows=num_rows)
    for path in directory.rglob("*"):
        (sync_directory if path.is_dir() else sync_file)(path)
    return AddedTokens(
        tokens=order.tokens,
        ids=tuple(ids),
        num_rows=num_rows,
        has_more_rows=num_rows > vocabulary.num_rows,
        embedding=vocabulary.embedding,
        head=vocabulary.head,
        separate_head=vocabulary.separate_head,
    )


def _two_heads(stored: StoredModel, config: Mapping[str, Any]) -> Finding | None:
    """Report an output head that config.json ties although the files hold other values for it. transformers loads these values,
    but drops them when it resizes the embeddings, which every user of the adapter must do.
    """
    family = stored.family
    head = next((path for path in family.ties if path in stored.parameters and stored.tie(path) is None), None)
    if head is None or family.always_tied or not family.is_tied(config):
        return None
    name = stored.parameters[head].parts[0].header.name
    return _finding(
        "added-tokens-without-rows",
        name,
        f"config.json says that the output head shares the values of the embeddings ({TIE_FIELD}), and the files hold others in "
        f"{name}: transformers loads these, and takes those of the embeddings as soon as rows are added",
        f"set {TIE_FIELD}: false in config.json of the base, if the head is to keep its own values, or else remove {name} from "
        "its files",
    )


def _copy_other_files(order: BaseOrder, checkpoint: Checkpoint, directory: Path) -> None:
    """Copy all files except weights, hidden files, and the tokenizer's files, which are saved separately."""
    left_out = {path.name for path in tokenizer_files(order.base)} | set(checkpoint.file_bytes)
    for path in sorted(order.base.iterdir()):
        is_weights = path.name.endswith(_WEIGHTS)
        if path.is_file() and path.name not in left_out and not is_weights and not path.name.startswith("."):
            copy_within(path, order.root, directory / path.name)


def _add_to_tokenizer(order: BaseOrder, directory: Path) -> tuple[list[int], int, Tokenizer] | Finding:
    """Write the tokenizer to `directory`; return the added ids, the number of rows for older tokens, and the tokenizer."""
    from tokenizers import AddedToken

    try:
        # First try to load it with limits: even a valid file may have millions of entries.
        run_sandboxed(lambda: load_tokenizer(order.base, order.allow_remote_code)[1])
    except SandboxEndedError as error:
        return unusable(order.base, f"loading the tokenizer {error}")
    tokenizer, findings = load_tokenizer(order.base, order.allow_remote_code)
    if tokenizer is None:
        return findings[0]
    library: Any = tokenizer
    before, contents = library.get_vocab(), [token.content for token in order.tokens]
    probes = [text for text in _PROBES if not any(content in text for content in contents)]
    as_before = [library(text)["input_ids"] for text in probes]
    known = known_token(order.tokens, before, library)
    if known is not None:
        return known
    # With `normalized=False` a token's text is matched as written, whatever the tokenizer does to other text first.
    library.add_tokens([AddedToken(token.content, special=token.special, normalized=False) for token in order.tokens])
    library.save_pretrained(directory)
    again, findings = load_tokenizer(directory, order.allow_remote_code)
    if again is None:
        return findings[0]
    reader: Any = again
    after = reader.get_vocab()
    ids = [after.get(content, -1) for content in contents]
    read = [reader(content, add_special_tokens=False)["input_ids"] for content in contents]
    lost = next((content for content, number, actual in zip(contents, ids, read, strict=True) if actual != [number]), None)
    if lost is None and len({*ids, *before.values()}) < len(ids) + len({*before.values()}):
        lost = contents[0]  # its id also belongs to another token
    is_changed = any(after.get(token) != number for token, number in before.items())
    is_changed = is_changed or [reader(text)["input_ids"] for text in probes] != as_before
    if lost is None and not is_changed:
        return ids, 1 + max(before.values()), again
    what = f"does not take {lost!r} for one token" if lost is not None else "tokenises other texts differently than before"
    return _finding(
        "added-token-not-kept",
        lost or contents[0],
        f"the tokenizer, saved and read again with the added tokens, {what}",
        "add the tokens with transformers, save and check model and tokenizer, and give their directory as spec.model.source",
    )


def _stop_at(ids: Sequence[int], tokenizer: Tokenizer, base: Path, directory: Path) -> None:
    """Make generation stop at these tokens too, in addition to those where it already stops."""
    path = directory / GENERATION_FILE
    settings = read_json(path) if path.is_file() else {}
    known = sorted(generation_stops(tokenizer, base))
    path.write_text(json.dumps({**settings, "eos_token_id": [*known, *ids]}, indent=2) + "\n")


def _no_room(checkpoint: Checkpoint, vocabulary: Vocabulary, num_rows: int, directory: Path) -> Finding | None:
    needed = written_bytes(checkpoint, vocabulary, num_rows, directory)
    statistics = os.statvfs(directory)
    free = statistics.f_bavail * statistics.f_frsize
    if needed <= free:
        return None
    return _too_small(directory, f"the base model with added tokens needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def _too_small(directory: Path, message: str) -> Finding:
    fix = "enlarge the claim, or make room on it"
    return make_finding("claim-too-small", field="spec.workspace", value=directory.parent.name, message=message, fix=fix)


def _finding(rule: str, value: str, message: str, fix: str) -> Finding:
    return make_finding(rule, field=FIELD, value=value[:80], message=message, fix=fix)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a child process of preflight, which does not import torch itself."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--parent", type=int, required=True)
    die_with(arguments.parse_args(argv).parent)
    written = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Output of libraries must not mix with the answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    written.write(answer(BaseOrder.model_validate_json(sys.stdin.read())))
    written.flush()
    return 0


if __name__ == "__main__":
    end(main())
