"""The merge from start to end: headers -> plan -> stream -> publish. It is the entry point for the merge role, the CLI and tests.

In: directories. Out: the merged model under its final name, and a MergeReport. A killed merge is simply run again: it continues
from what is durable, and a finished output of the same plan is accepted as done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.files import file_sha256, link_root, links_outside
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.inputs import MergeInputs, plan_merge, tokenizer_directory
from finetune_trainer.merge.plan import MergePlan, plan_digest
from finetune_trainer.merge.stream import ProgressCallback, StreamResult, stream
from finetune_trainer.merge.writer import OutputDirectory, WrittenFile, complete_manifest, remove_leftovers
from finetune_trainer.weights.errors import BrokenCheckpointError, MergeError, StorageError
from finetune_trainer.weights.headers import read_checkpoint, require_all_named, unnamed_files
from finetune_trainer.weights.storage import translate_os_errors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeOptions:
    """Options of a merge.

    base, adapters: existing directories; adapters are merged in this order. output: created. dtype: None keeps the base's; else
    bfloat16, float16, float32. quantization: merge into the base as a QLoRA training with these settings saw it; None merges into
    the base as stored. device: of matrix products; PEFT's bits are promised only for cpu.
    """

    base: Path
    adapters: tuple[Path, ...]
    output: Path
    dtype: str | None
    max_shard_bytes: int
    quantization: Quantization | None = None
    device: str = "cpu"
    base_root: Path | None = None
    """Directory below which links of the base may lead; None: that of `link_root` for a directory on no claim."""

    def root_of(self, directory: Path) -> Path:
        """Directory below which links of the base or of an adapter may lead."""
        return self.base_root if directory == self.base and self.base_root is not None else link_root(directory)


@dataclass(frozen=True)
class MergeReport:
    """Figures of a finished merge.

    bytes_resumed: of shards that an earlier, killed merge had finished. whole_tensors: tensors of which a matrix had to be
    computed at once (see stream.py). num_rows: of embeddings that were made larger than the base's. left_out: weights beside the
    base that belong neither to it nor to the merged model.
    """

    output: Path
    plan_sha256: str
    num_tensors: int
    num_changed_tensors: int
    num_adapter_tensors: int
    bytes_read: int
    bytes_written: int
    bytes_resumed: int
    seconds: float
    sha256: dict[str, str]
    whole_tensors: tuple[str, ...]
    was_complete: bool
    num_rows: int | None = None
    left_out: tuple[str, ...] = ()


def merge_adapter(options: MergeOptions, progress: ProgressCallback | None = None) -> MergeReport:
    """Merge, or find the merge done. progress: called with (bytes of existing weights, bytes in all).

    Raises subclasses of MergeError, each with a `reason`; then `options.output` was not created. After a StorageError finished
    parts are kept for the next merge, after other errors nothing is.
    """
    started = time.monotonic()
    _require_another_output(options)
    _require_links_inside(options)
    inputs = MergeInputs.of(options.base, options.adapters)
    plan = plan_merge(options.base, options.adapters, options.dtype, options.max_shard_bytes, options.quantization)
    base = read_checkpoint(options.base)
    others = unnamed_files(base)
    require_all_named(base, others)
    if others:
        log.warning("%s: not in the merged model, because they are no part of the base: %s", options.base, ", ".join(others))
    digests = inputs.digests()
    # Another device may give other bits.
    digest = plan_digest(plan, digests if options.device == "cpu" else {**digests, "device": options.device})
    existing = complete_manifest(options.output, digest)
    if existing is None:
        tokenizer = tokenizer_directory(options.base, options.adapters, plan.num_rows)
        directory = OutputDirectory(options.output, digest, inputs.identity())
        try:
            # Another merge may have ended before the lock was taken.
            existing = complete_manifest(options.output, digest)
        except BaseException:
            directory.close(keep=True)
            raise
        if existing is None:
            files, result = _write(
                options, plan, directory, tokenizer, inputs=inputs, digests=digests, plan_sha256=digest, progress=progress
            )
            sha256 = {file.name: file.sha256 for file in files}
            return _report(options, plan, digest, started, sha256=sha256, result=result, left_out=others)
        directory.close(keep=False)
    remove_leftovers(options.output)
    sha256 = {entry["name"]: entry["sha256"] for entry in existing["files"]}
    return _report(options, plan, digest, started, sha256=sha256, result=None, left_out=others)


def _write(
    options: MergeOptions,
    plan: MergePlan,
    directory: OutputDirectory,
    tokenizer: Path,
    *,
    inputs: MergeInputs,
    digests: dict[str, str],
    plan_sha256: str,
    progress: ProgressCallback | None,
) -> tuple[list[WrittenFile], StreamResult]:
    """Write the whole output under its final name."""
    try:
        shards = directory.open_shards(plan)
        try:
            directory.copy_model_files(options.base, tokenizer, options.root_of, options.dtype, plan.config_changes)
            directory.write_index(plan)
            result = stream(shards, directory.journal, progress, device=options.device)
        finally:
            for file in shards.values():
                file.close()
        inputs.require_unchanged(digests)
        files = [WrittenFile(shard.file_name, shard.num_bytes, result.sha256[shard.file_name]) for shard in plan.shards]
        files += [_small_file(path, directory.path) for path in directory.small_files({shard.file_name for shard in plan.shards})]
        directory.write_manifest(files, {"plan_sha256": plan_sha256, "dtype": options.dtype})
        directory.publish()
    except BaseException as error:
        directory.close(keep=isinstance(error, StorageError) or not isinstance(error, MergeError))
        raise
    return files, result


def _require_another_output(options: MergeOptions) -> None:
    for role, path in (("base", options.base), *(("adapter", adapter) for adapter in options.adapters)):
        if options.output.resolve() == path.resolve():
            raise MergeError(f"output {options.output} is the {role} directory itself. Choose another output.")


def _require_links_inside(options: MergeOptions) -> None:
    """Raise BrokenCheckpointError for a link that leads elsewhere, whose target would become part of the merged model."""
    for directory in (options.base, *options.adapters):
        for error in links_outside(directory, options.root_of(directory)) if directory.is_dir() else ():
            raise BrokenCheckpointError(f"{error.filename}: {error.strerror}. Put the file itself in its place.")


def _small_file(path: Path, root: Path) -> WrittenFile:
    with translate_os_errors(path, "read"):
        return WrittenFile(path.relative_to(root).as_posix(), path.stat().st_size, file_sha256(path))


def _report(
    options: MergeOptions,
    plan: MergePlan,
    digest: str,
    started: float,
    *,
    sha256: dict[str, str],
    result: StreamResult | None,
    left_out: Sequence[str],
) -> MergeReport:
    """result: None if the merge was already done."""
    done = result or StreamResult()
    return MergeReport(
        output=options.output,
        plan_sha256=digest,
        num_tensors=len(plan.tensors),
        num_changed_tensors=sum(tensor.is_changed_by_adapter for tensor in plan.tensors),
        num_adapter_tensors=len(plan.adapter_tensors),
        bytes_read=done.bytes_read,
        bytes_written=done.bytes_written,
        bytes_resumed=done.bytes_resumed,
        seconds=time.monotonic() - started,
        sha256=sha256,
        whole_tensors=tuple(done.whole_tensors),
        was_complete=result is None,
        num_rows=plan.num_rows,
        left_out=tuple(left_out),
    )
