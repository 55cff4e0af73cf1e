"""The merge, start to end: headers -> plan -> stream -> publish. The way in for the merge role, the CLI and tests.

In: three directories. Out: the merged model under its final name, and a MergeReport. A merge that was killed is simply
run again: its temporary directory is removed, and a finished output of the same plan is accepted as done.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.merge.errors import MergeError
from finetune_trainer.merge.headers import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    Checkpoint,
    read_adapter,
    read_checkpoint,
    read_json,
)
from finetune_trainer.merge.plan import MergePlan, Shard, merge_plan, plan_digest
from finetune_trainer.merge.shard_file import ShardFile
from finetune_trainer.merge.stream import stream
from finetune_trainer.merge.writer import OutputDirectory, WrittenFile, complete_manifest

FINGERPRINT_BYTES = 64 << 10
"""Read from each end of every base shard to tell models of equal layout apart. Hashing all of it would cost a merge."""


@dataclass(frozen=True)
class MergeOptions:
    """base, adapter: existing directories. output: created. dtype: None keeps the base's, or bfloat16, float16, float32."""

    base: Path
    adapter: Path
    output: Path
    dtype: str | None
    max_shard_bytes: int


@dataclass(frozen=True)
class MergeReport:
    """Figures of a finished merge. whole_tensors: weights that had to be held in memory whole (see stream.py)."""

    output: Path
    plan_sha256: str
    num_tensors: int
    num_changed_tensors: int
    num_adapter_tensors: int
    bytes_read: int
    bytes_written: int
    seconds: float
    sha256: dict[str, str]
    whole_tensors: tuple[str, ...]
    was_complete: bool


def merge_adapter(options: MergeOptions, progress: Callable[[int, int], None] | None = None) -> MergeReport:
    """Merges or finds the merge done. progress: called with (bytes written, bytes in all).

    Raises subclasses of MergeError, each with a `reason`; then no directory called `options.output` was made.
    """
    started = time.monotonic()
    plan = plan_merge(options.base, options.adapter, options.dtype, options.max_shard_bytes)
    digest = plan_digest(plan, _inputs(options))
    existing = complete_manifest(options.output, digest)
    if existing is not None:
        sha256 = {entry["name"]: entry["sha256"] for entry in existing["files"]}
        return _report(options, plan, digest, started, sha256, was_complete=True)

    output = OutputDirectory(options.output)
    try:
        output.copy_model_files(options.base, options.adapter, options.dtype)
        output.write_index(plan)
        shard_files: dict[Shard, ShardFile] = {}
        try:
            for shard in plan.shards:
                shard_files[shard] = output.create_shard(shard)
            result = stream(shard_files, progress)
        except BaseException:
            for file in shard_files.values():
                file.abandon()
            raise
        for file in shard_files.values():
            file.close()
        files = [WrittenFile(shard.file_name, shard.num_bytes, result.sha256[shard.file_name]) for shard in plan.shards]
        files += [_small_file(path) for path in output.small_files({shard.file_name for shard in plan.shards})]
        facts = {"plan_sha256": digest, "dtype": options.dtype, "whole_tensors": result.whole_tensors}
        output.write_manifest(files, facts)
        output.publish()
    except BaseException:
        output.discard()
        raise
    return _report(
        options,
        plan,
        digest,
        started,
        {file.name: file.sha256 for file in files},
        bytes_read=result.bytes_read,
        bytes_written=result.bytes_written,
        whole_tensors=tuple(result.whole_tensors),
    )


def plan_merge(base: Path, adapter: Path, dtype: str | None, max_shard_bytes: int) -> MergePlan:
    """The plan of a merge, from headers and configurations only: cheap enough for preflight. Raises MergeError."""
    return merge_plan(
        base=read_checkpoint(base).tensors,
        base_config=read_json(base / CONFIG_FILE),
        adapter=read_adapter(adapter).tensors,
        adapter_config=read_json(adapter / ADAPTER_CONFIG_FILE),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )


def _inputs(options: MergeOptions) -> dict[str, str]:
    """Content digests: the adapter's files whole, the base's headers and ends."""
    for role, directory in (("base", options.base), ("adapter", options.adapter)):
        if options.output.resolve() == directory.resolve():
            raise MergeError(f"output {options.output} is the {role} directory itself. Choose another output.")
    inputs = {f"base/{CONFIG_FILE}": _file_sha256(options.base / CONFIG_FILE)}
    inputs[f"adapter/{ADAPTER_CONFIG_FILE}"] = _file_sha256(options.adapter / ADAPTER_CONFIG_FILE)
    for role, checkpoint in (("adapter", read_adapter(options.adapter)), ("base", read_checkpoint(options.base))):
        for name in checkpoint.file_bytes:
            digest = _file_sha256 if role == "adapter" else _fingerprint
            inputs[f"{role}/{name}"] = digest(_path(checkpoint, name))
    return inputs


def _path(checkpoint: Checkpoint, name: str) -> Path:
    return checkpoint.directory / name


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - FINGERPRINT_BYTES))
        digest.update(file.read())
    digest.update(str(size).encode())
    return digest.hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _small_file(path: Path) -> WrittenFile:
    return WrittenFile(path.name, path.stat().st_size, _file_sha256(path))


def _report(
    options: MergeOptions,
    plan: MergePlan,
    digest: str,
    started: float,
    sha256: dict[str, str],
    *,
    bytes_read: int = 0,
    bytes_written: int = 0,
    whole_tensors: tuple[str, ...] = (),
    was_complete: bool = False,
) -> MergeReport:
    return MergeReport(
        output=options.output,
        plan_sha256=digest,
        num_tensors=len(plan.tensors),
        num_changed_tensors=sum(tensor.is_changed_by_adapter for tensor in plan.tensors),
        num_adapter_tensors=len(plan.adapter_tensors),
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        seconds=time.monotonic() - started,
        sha256=sha256,
        whole_tensors=whole_tensors,
        was_complete=was_complete,
    )
