"""Writes the output directory under a temporary name, and renames it when it is complete and durable.

These names exist in turn:

    <output>.tmp-journal    created and locked, so that only one merge runs at a time
    <output>.tmp-merge/     has the shards at their full size; the journal says which of their bytes are durable.
                            Config, tokenizer and index follow, and manifest.json comes last. All are synced.
    <output>                after the rename; then the parent is synced and the journal deleted

So a directory with the name <output> is always complete, and a merge that was killed can be resumed. merge_adapter.py calls this
module, and stream.py fills the shards.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from finetune_trainer.companion_files import companion_files
from finetune_trainer.files import (
    CODE_SUFFIX,
    GENERATION_FILE,
    HASHING_THREADS,
    MANIFEST_FILE,
    TEMPORARY_MARK,
    copy_within,
    file_sha256,
    remove_tree,
    tokenizer_files,
)
from finetune_trainer.merge.inputs import TOKENIZER_FILE
from finetune_trainer.merge.journal import Journal
from finetune_trainer.merge.plan import MergePlan, Shard
from finetune_trainer.merge.shard_file import ShardFile
from finetune_trainer.weights.errors import NoSpaceError, OutputBusyError, OutputExistsError
from finetune_trainer.weights.headers import CONFIG_FILE, INDEX_FILE, read_json
from finetune_trainer.weights.storage import sync, translate_os_errors

MANIFEST_FORMAT = 1
_LARGE_JSON = (TOKENIZER_FILE, "vocab.json")
"""Files that may be large. They are not checked for NaN, because the library that reads them refuses it."""
_SETTINGS = (GENERATION_FILE, "preprocessor_config.json", "processor_config.json")
"""Files, besides the tokenizer's, that must be JSON objects. Other files may have any content."""


def temporary_directory(output: Path) -> Path:
    """Return the directory in which a merge into `output` writes until the output is complete."""
    return output.with_name(f"{output.name}{TEMPORARY_MARK}merge")


def journal_path(output: Path) -> Path:
    """Return the path of the journal, which is also the lock, of a merge into `output`."""
    return output.with_name(f"{output.name}{TEMPORARY_MARK}journal")


def complete_manifest(output: Path, plan_sha256: str) -> dict[str, Any] | None:
    """Return the manifest of a finished merge with this plan digest, or None if `output` does not exist.

    Raises OutputExistsError if `output` is something else, which is never overwritten.
    """
    if not output.exists():
        return None
    if not (output / MANIFEST_FILE).exists():
        raise OutputExistsError(f"{output} exists and was not written by a merge. Remove it or choose another output.")
    manifest = read_json(output / MANIFEST_FILE)
    if manifest.get("plan_sha256") != plan_sha256:
        raise OutputExistsError(
            f"{output} holds a merge of other inputs or options (plan {manifest.get('plan_sha256')}, now {plan_sha256}). "
            "Remove it or choose another output."
        )
    for entry in manifest["files"]:
        path = output / entry["name"]
        if not path.is_file() or path.stat().st_size != entry["num_bytes"]:
            raise OutputExistsError(f"{path} is missing, or its size differs from manifest.json. Remove {output}.")
    return manifest


def remove_leftovers(output: Path) -> None:
    """Delete what remains next to a complete output if a merge was killed between its last two steps."""
    if not (journal_path(output).exists() or temporary_directory(output).exists()):
        return
    try:
        journal = Journal(journal_path(output), "", {})
    except OutputBusyError:
        return
    shutil.rmtree(temporary_directory(output), ignore_errors=True)
    journal.remove()


class OutputDirectory:
    """A directory that `publish` renames to `output`. Raises OutputBusyError while another merge into `output` is running.

    inputs: identity of the input files as JSON. Bytes left behind by a merge with another plan or other inputs are deleted.
    """

    def __init__(self, output: Path, plan_sha256: str, inputs: Mapping[str, Any]) -> None:
        self._output = output
        self.path = temporary_directory(output)
        with translate_os_errors(output.parent, "written"):
            output.parent.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(journal_path(output), plan_sha256, inputs)
        try:
            with translate_os_errors(self.path, "written"):
                # Anyone who can write to the claim can create this directory, so it is kept only if the journal is continued.
                if not self.journal.is_continued or not self.path.is_dir() or self.path.is_symlink():
                    remove_tree(self.path)
                self.path.mkdir(exist_ok=True)
            sync(output.parent)
        except BaseException:
            self.journal.close()
            raise

    def open_shards(self, plan: MergePlan) -> dict[Shard, ShardFile]:
        """Open the plan's files at their full size, and keep their durable parts. Raises NoSpaceError if space is short."""
        names = {shard.file_name for shard in plan.shards}
        with translate_os_errors(self.path, "written"):
            for path in self.path.iterdir():
                if path.name not in names:
                    remove_tree(path)
            present = sum(path.stat().st_blocks * 512 for path in self.path.iterdir())
            file_system = os.statvfs(self.path)
        free = file_system.f_bavail * file_system.f_frsize
        if plan.num_bytes - present > free:
            raise NoSpaceError(
                f"{self.path}: {free} bytes are free, but the merged model needs {plan.num_bytes - present} more. It takes as "
                "much space as the base model in the merge's dtype; enlarge the workspace."
            )
        opened: dict[Shard, ShardFile] = {}

        def open_one(shard: Shard) -> None:
            durable = self.journal.durable.get(shard.file_name)
            opened[shard] = ShardFile(self.path / shard.file_name, shard.num_bytes, shard.header, durable)

        try:
            with ThreadPoolExecutor(HASHING_THREADS) as pool:
                for _ in pool.map(open_one, plan.shards):
                    pass
            sync(self.path)
        except BaseException:
            for file in opened.values():
                file.close()
            raise
        return {shard: opened[shard] for shard in plan.shards}

    def copy_model_files(
        self, base: Path, tokenizer: Path, root_of: Callable[[Path], Path], dtype: str | None, plan: MergePlan
    ) -> None:
        """Copy the base's files besides its weights, and the tokenizer. Write the configuration and the index of the shards.

        tokenizer: its directory. root_of: returns the directory outside which links in a directory must not point. dtype: is
        written to config.json. Raises StorageError for a link that points outside, and BrokenCheckpointError for settings that
        are not JSON, such as NaN.
        """
        config = {**read_json(base / CONFIG_FILE), **plan.config_changes}
        if dtype is not None:
            config = {**_in_dtype(config, dtype), "dtype": dtype}
        self._write_json(CONFIG_FILE, config)
        index = plan.index()
        if index is not None:
            self._write_json(INDEX_FILE, index)
        # A model with its own code cannot be loaded without that code. The code runs only if the user allows it.
        apart = {*tokenizer_files(base), *(() if "auto_map" in config else base.glob(f"*{CODE_SUFFIX}"))}
        others = [path.name for path in companion_files(base) if path not in apart]
        # All files of the tokenizer come from one directory, because files of two directories may not fit together.
        of_tokenizer = [str(path.relative_to(tokenizer)) for path in tokenizer_files(tokenizer) if path.suffix != CODE_SUFFIX]
        for source, names in ((base, others), (tokenizer, of_tokenizer)):
            for name in names:
                if (source / name).is_file():
                    is_read = name.endswith(".json") and (names is of_tokenizer or name in _SETTINGS)
                    if is_read and name not in _LARGE_JSON:
                        read_json(source / name)
                    with translate_os_errors(self.path / name, "copied"):
                        (self.path / name).parent.mkdir(exist_ok=True)
                        copy_within(source / name, root_of(source), self.path / name)

    def write_manifest(self, plan: MergePlan, sha256: Mapping[str, str], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write manifest.json, the last file, which proves that the output is complete. Return its content.

        sha256: digests of the shards, by file name. facts: plan digest and further facts about the merge.
        """
        files = [(shard.file_name, shard.num_bytes, sha256[shard.file_name]) for shard in plan.shards]
        for path in sorted(self.path.rglob("*")):
            if path.name not in sha256 and path.is_file():
                with translate_os_errors(path, "read"):
                    files.append((path.relative_to(self.path).as_posix(), path.stat().st_size, file_sha256(path)))
        for path in self.path.rglob("*"):
            sync(path)
        entries = [{"name": name, "num_bytes": num_bytes, "sha256": digest} for name, num_bytes, digest in files]
        manifest = {"format": MANIFEST_FORMAT, **facts, "files": entries}
        self._write_json(MANIFEST_FILE, manifest)
        sync(self.path / MANIFEST_FILE)
        return manifest

    def publish(self) -> None:
        """Make the names of the files durable, then rename the directory. `write_manifest` made their contents durable."""
        sync(self.path)
        with translate_os_errors(self._output, "renamed into place"):
            try:
                self.path.rename(self._output)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise OutputExistsError(f"{self._output}: appeared while the merge ran. Remove one of the two.") from error
                raise
        sync(self._output.parent)
        self.journal.remove()

    def close(self, *, keep: bool) -> None:
        """Clean up after an error. keep: whether to keep the parts in the journal for the next merge, or delete everything."""
        if keep and self.journal.has_records:
            self.journal.close()
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.journal.remove()

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        with translate_os_errors(self.path / name, "written"):
            (self.path / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json with its dtype changed, also in nested configurations. The field gets its current name, `dtype`."""
    changed: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("torch_dtype", "dtype"):
            changed["dtype"] = dtype
        else:
            changed[name] = _in_dtype(value, dtype) if isinstance(value, Mapping) else value
    return changed
