"""The output directory: written beside its final name, complete and on disk before it gets that name.

Life of an output:  <output>.tmp-<id>/  shards preallocated, filled in place, fsynced
                    -> config, tokenizer, index, manifest.json (last), directory fsynced
                    -> renamed to <output>, parent fsynced.
So a directory called <output> is complete whatever happened to the process. Called by run.py; bytes come from stream.py.
"""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.merge.errors import OutputExistsError
from finetune_trainer.merge.headers import CONFIG_FILE, read_json
from finetune_trainer.merge.plan import MergePlan, Shard
from finetune_trainer.merge.shard_file import ShardFile

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
GENERATION_FILES = ("generation_config.json",)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files that transformers' tokenizers save. Taken as one set, from the adapter if it has a tokenizer, else the base."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")


@dataclass(frozen=True)
class WrittenFile:
    """One file of the output, as the manifest lists it."""

    name: str
    num_bytes: int
    sha256: str


def temporary_directories(output: Path) -> list[Path]:
    """What earlier merges into `output` that did not finish have left behind."""
    return sorted(output.parent.glob(f"{output.name}.tmp-*"))


def complete_manifest(output: Path, digest: str) -> dict[str, Any] | None:
    """The manifest of a finished merge with this plan digest, None when nothing is there.

    Raises OutputExistsError when something else is there, which is never overwritten.
    """
    if not output.exists():
        return None
    if not (output / MANIFEST_FILE).exists():
        raise OutputExistsError(f"{output}: exists and is no merged model of ours. Remove it or choose another output.")
    manifest = read_json(output / MANIFEST_FILE)
    if manifest.get("plan_sha256") != digest:
        raise OutputExistsError(
            f"{output}: holds a merge of other inputs or options (plan {manifest.get('plan_sha256')}, now {digest}). "
            "Remove it or choose another output."
        )
    for entry in manifest["files"]:
        path = output / entry["name"]
        if not path.is_file() or path.stat().st_size != entry["num_bytes"]:
            raise OutputExistsError(f"{path}: is missing or of another size than manifest.json says. Remove {output}.")
    return manifest


class OutputDirectory:
    """A directory that takes its name only in `publish`."""

    def __init__(self, output: Path) -> None:
        for leftover in temporary_directories(output):
            shutil.rmtree(leftover)
        self._output = output
        self.path = output.parent / f"{output.name}.tmp-{uuid.uuid4().hex[:12]}"
        self.path.mkdir(parents=True)

    def create_shard(self, shard: Shard) -> ShardFile:
        """Allocates the file and writes its header. Raises MergeError when space is short."""
        return ShardFile(self.path / shard.file_name, shard.num_bytes, shard.header)

    def copy_model_files(self, base: Path, adapter: Path, dtype: str | None) -> None:
        """Configuration, generation defaults, tokenizer, chat template, licence. dtype: recorded in config.json."""
        config = read_json(base / CONFIG_FILE)
        if dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = dtype
        self._write_json(CONFIG_FILE, config)
        tokenizer_source = adapter if (adapter / "tokenizer_config.json").exists() else base
        for source, names in (
            (base, GENERATION_FILES + PROCESSOR_FILES + LICENCE_FILES),
            (tokenizer_source, TOKENIZER_FILES),
        ):
            for name in names:
                if (source / name).is_file():
                    shutil.copyfile(source / name, self.path / name)

    def write_index(self, plan: MergePlan) -> None:
        index = plan.index()
        if index is not None and plan.index_file is not None:
            self._write_json(plan.index_file, index)

    def write_manifest(self, files: list[WrittenFile], facts: Mapping[str, Any]) -> None:
        """The proof of completeness, last of all files. facts: plan digest and what else describes the merge."""
        entries = [{"name": f.name, "num_bytes": f.num_bytes, "sha256": f.sha256} for f in files]
        self._write_json(MANIFEST_FILE, {"format": MANIFEST_FORMAT, **facts, "files": entries})

    def small_files(self, shards: set[str]) -> list[Path]:
        """Everything written so far that is no weight shard."""
        return sorted(path for path in self.path.iterdir() if path.name not in shards)

    def publish(self) -> None:
        """Makes all names durable and gives the directory its name, in this order."""
        for path in self.path.iterdir():
            _fsync(path)
        _fsync(self.path)
        try:
            self.path.rename(self._output)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise OutputExistsError(f"{self._output}: appeared while the merge ran. Remove one of the two.") from error
            raise
        _fsync(self._output.parent)

    def discard(self) -> None:
        """Removes the unfinished directory after an error; a kill leaves it for the next merge to remove."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
