"""The output directory: written beside its final name, complete and durable before it gets that name. written next to its final
name, complete and on disk before it gets that name.

Life of an output:  <output>.tmp-journal  made and locked: one merge at a time
<output>.tmp-merge/   shards of their full size, filled in place; the journal says what of them is on disk
-> config, tokenizer, index, manifest.json (last), all synced
-> renamed to <output>, parent synced, journal deleted.
So a directory called <output> is complete whatever happened to the process, and what was finished before a kill is taken up.
Called by merge_adapter.py; bytes come from stream.py.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.files import (
    CODE_SUFFIX,
    HASHING_THREADS,
    MANIFEST_FILE,
    TEMPORARY_MARK,
    copy_within,
    licence_files,
    remove_tree,
    tokenizer_files,
)
from finetune_trainer.merge.inputs import TOKENIZER_FILE
from finetune_trainer.merge.journal import Journal
from finetune_trainer.merge.plan import MergePlan, Shard
from finetune_trainer.merge.shard_file import ShardFile
from finetune_trainer.weights.errors import NoSpaceError, OutputBusyError, OutputExistsError
from finetune_trainer.weights.headers import CONFIG_FILE, read_json
from finetune_trainer.weights.storage import sync, translate_os_errors

MANIFEST_FORMAT = 1
GENERATION_FILES = ("generation_config.json",)
_LARGE_JSON = (TOKENIZER_FILE, "vocab.json")
"""Files of the tokenizer's library, which accepts no NaN."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class WrittenFile:
    """One file of the output, as the manifest lists it."""

    name: str
    num_bytes: int
    sha256: str


def temporary_directory(output: Path) -> Path:
    """Directory of a merge into `output` until it is complete."""
    return output.with_name(f"{output.name}{TEMPORARY_MARK}merge")


def journal_path(output: Path) -> Path:
    """The journal and lock of a merge into `output`."""
    return output.with_name(f"{output.name}{TEMPORARY_MARK}journal")


def complete_manifest(output: Path, plan_sha256: str) -> dict[str, Any] | None:
    """The manifest of a finished merge with this plan digest, or None if nothing is there.

    Raises OutputExistsError when something else is there, which is never overwritten.
    """
    if not output.exists():
        return None
    if not (output / MANIFEST_FILE).exists():
        raise OutputExistsError(f"{output}: exists and is not a merged model of ours. Remove it or choose another output.")
    manifest = read_json(output / MANIFEST_FILE)
    if manifest.get("plan_sha256") != plan_sha256:
        raise OutputExistsError(
            f"{output}: holds a merge of other inputs or options (plan {manifest.get('plan_sha256')}, now {plan_sha256}). "
            "Remove it or choose another output."
        )
    for entry in manifest["files"]:
        path = output / entry["name"]
        if not path.is_file() or path.stat().st_size != entry["num_bytes"]:
            raise OutputExistsError(f"{path}: is missing or of another size than manifest.json says. Remove {output}.")
    return manifest


def remove_leftovers(output: Path) -> None:
    """Delete what a merge that was killed between its last two steps has left beside the complete output."""
    if not (journal_path(output).exists() or temporary_directory(output).exists()):
        return
    try:
        journal = Journal(journal_path(output), "", {})
    except OutputBusyError:
        return
    shutil.rmtree(temporary_directory(output), ignore_errors=True)
    journal.remove()


class OutputDirectory:
    """A directory that gets its name only in `publish`. Raises OutputBusyError while another merge into `output` runs.

    inputs: from which existing bytes were made, as JSON; with another plan or other inputs the bytes are deleted.
    """

    def __init__(self, output: Path, plan_sha256: str, inputs: Mapping[str, Any]) -> None:
        self._output = output
        self.path = temporary_directory(output)
        with translate_os_errors(output.parent, "written"):
            output.parent.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(journal_path(output), plan_sha256, inputs)
        try:
            with translate_os_errors(self.path, "written"):
                # Anyone who can write to the claim may have put anything under this name.
                if not self.journal.is_continued or not self.path.is_dir() or self.path.is_symlink():
                    remove_tree(self.path)
                self.path.mkdir(exist_ok=True)
            sync(output.parent)
        except BaseException:
            self.journal.close()
            raise

    def open_shards(self, plan: MergePlan) -> dict[Shard, ShardFile]:
        """Open the plan's files in their full size, with their proven parts. Raises NoSpaceError when space is short."""
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
                f"{self.path}: {free} bytes are free, the merged model needs {plan.num_bytes - present} more. It takes as much "
                "space as the base model, or what its dtype takes; enlarge the workspace."
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
        self, base: Path, tokenizer: Path, root_of: Callable[[Path], Path], dtype: str | None, config_changes: Mapping[str, Any]
    ) -> None:
        """Copy configuration, generation defaults, tokenizer, chat template, licence.

        tokenizer: its directory. root_of: directory below which links of a directory may lead. dtype: recorded in config.json.
        Raises BrokenCheckpointError for a link that leads elsewhere, and for settings that are no JSON, such as NaN.
        """
        config = {**read_json(base / CONFIG_FILE), **config_changes}
        if dtype is not None:
            config = {**_in_dtype(config, dtype), "dtype": dtype}
        self._write_json(CONFIG_FILE, config)
        # Models with code of their own cannot be loaded without it; it runs only if the user allows it.
        code = sorted(path.name for path in base.glob("*.py")) if "auto_map" in config else []
        terms = [path.name for path in licence_files(base)]
        # All from one directory: the tokenizer's files of two directories would not fit together.
        of_tokenizer = [str(path.relative_to(tokenizer)) for path in tokenizer_files(tokenizer) if path.suffix != CODE_SUFFIX]
        for source, names in ((base, [*GENERATION_FILES, *PROCESSOR_FILES, *terms, *code]), (tokenizer, of_tokenizer)):
            for name in names:
                if (source / name).is_file():
                    if name.endswith(".json") and name not in _LARGE_JSON:
                        read_json(source / name)
                    with translate_os_errors(self.path / name, "copied"):
                        (self.path / name).parent.mkdir(exist_ok=True)
                        copy_within(source / name, root_of(source), self.path / name)

    def write_index(self, plan: MergePlan) -> None:
        index = plan.index()
        if index is not None and plan.index_file is not None:
            self._write_json(plan.index_file, index)

    def write_manifest(self, files: list[WrittenFile], facts: Mapping[str, Any]) -> None:
        """Write the proof of completeness, last of all files. facts: plan digest and further facts about the merge."""
        for path in self.path.rglob("*"):
            sync(path)
        entries = [{"name": f.name, "num_bytes": f.num_bytes, "sha256": f.sha256} for f in files]
        self._write_json(MANIFEST_FILE, {"format": MANIFEST_FORMAT, **facts, "files": entries})
        sync(self.path / MANIFEST_FILE)

    def small_files(self, shards: set[str]) -> list[Path]:
        """Everything written so far that is not a weight shard."""
        return sorted(path for path in self.path.rglob("*") if path.name not in shards and path.is_file())

    def publish(self) -> None:
        """Make all names durable and give the directory its name, in this order. Files are durable since `write_manifest`."""
        sync(self.path)
        with translate_os_errors(self._output, "renamed into place"):
            self._rename()
        sync(self._output.parent)
        self.journal.remove()

    def _rename(self) -> None:
        try:
            self.path.rename(self._output)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise OutputExistsError(f"{self._output}: appeared while the merge ran. Remove one of the two.") from error
            raise

    def close(self, *, keep: bool) -> None:
        """Clean up after an error. keep: leave the durable parts in the journal for the next merge; otherwise nothing is left."""
        if keep and self.journal.has_records:
            self.journal.close()
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.journal.remove()

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        with translate_os_errors(self.path / name, "written"):
            (self.path / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Change the dtype wherever one is named, as for the text model inside a multimodal one, under transformers' current name for
    it.
    """
    changed: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("torch_dtype", "dtype"):
            changed["dtype"] = dtype
        else:
            changed[name] = _in_dtype(value, dtype) if isinstance(value, Mapping) else value
    return changed
