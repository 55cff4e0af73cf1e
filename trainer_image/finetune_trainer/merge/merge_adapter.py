"""Merges adapters into a base: reads headers, plans, streams and publishes. The merge role, the command line and tests call it.

The merged model is renamed into place when it is complete. Run a killed merge again: it resumes after the bytes that are durable,
or accepts a finished output of the same plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.files import link_root, links_outside
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.inputs import MergeInputs, plan_merge, tokenizer_directory
from finetune_trainer.merge.plan import MergePlan, plan_digest
from finetune_trainer.merge.stream import ProgressCallback, StreamResult, stream
from finetune_trainer.merge.writer import OutputDirectory, complete_manifest, remove_leftovers
from finetune_trainer.weights.base_identity import base_doubt, require_base
from finetune_trainer.weights.errors import BrokenCheckpointError, MergeError, StorageError, UnsupportedAdapterError
from finetune_trainer.weights.headers import read_checkpoint, require_all_named, unnamed_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeOptions:
    """Options of a merge.

    base, adapters: existing directories; adapters are merged in this order. output: the directory to create. dtype: bfloat16,
    float16 or float32; None keeps the base's dtype. quantization: merge into the base as quantized in QLoRA training with these
    settings; None: merge into the base as stored.
    """

    base: Path
    adapters: tuple[Path, ...]
    output: Path
    dtype: str | None
    max_shard_bytes: int
    quantization: Quantization | None = None
    base_root: Path | None = None
    """The directory outside which links in the base must not point; None: the result of `link_root`."""
    refuses_misfits: bool = False
    """Whether to refuse an adapter that records another base, or that leaves the model unchanged."""

    def root_of(self, directory: Path) -> Path:
        """Return the directory outside which links in the base or in an adapter must not point."""
        return self.base_root if directory == self.base and self.base_root is not None else link_root(directory)


@dataclass(frozen=True)
class MergeReport:
    """The results of a finished merge.

    bytes_resumed: bytes of shards that an earlier, killed merge had written. whole_tensors: tensors with a matrix that was
    computed in one piece (see stream.py). num_rows: number of rows of the embeddings if they are larger than the base's.
    left_out: weight files in the base's directory that belong neither to the base nor to the merged model.
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


def merge_adapter(
    options: MergeOptions, progress: ProgressCallback | None = None, before_writing: Callable[[], None] | None = None
) -> MergeReport:
    """Merge, unless the same merge is already complete.

    progress: called with (bytes of weights so far, bytes in total). before_writing: called once the merge is planned; if it
    raises, nothing is written. Raises subclasses of MergeError, in which case `options.output` was not created. After a
    StorageError, durable parts are kept for the next merge; after other MergeErrors, nothing is kept.
    """
    started = time.monotonic()
    for role, path in (("base", options.base), *(("adapter", adapter) for adapter in options.adapters)):
        if options.output.resolve() == path.resolve():
            raise MergeError(f"output {options.output} is the {role} directory itself. Choose another output.")
        # Otherwise, any file that a link points to would become part of the merged model.
        for error in links_outside(path, options.root_of(path)) if path.is_dir() else ():
            raise BrokenCheckpointError(f"{error.filename}: {error.strerror}. Put the file itself in its place.")
    inputs = MergeInputs.of(options.base, options.adapters)
    for number, adapter in enumerate(options.adapters):
        # A later adapter may have been trained on the merge of those before it.
        if options.refuses_misfits and number == 0:
            require_base(options.base, adapter)
        if (doubt := base_doubt(options.base, adapter)) is not None:
            log.warning("%s", doubt)
    plan = plan_merge(options.base, options.adapters, options.dtype, options.max_shard_bytes, options.quantization)
    if before_writing is not None:
        before_writing()
    base = read_checkpoint(options.base)
    others = unnamed_files(base)
    require_all_named(base, others)
    if others:
        log.warning("%s: not in the merged model, because they are not part of the base: %s", options.base, ", ".join(others))
    digests = inputs.digests()
    digest = plan_digest(plan, digests)
    existing = complete_manifest(options.output, digest)
    result: StreamResult | None = None
    if existing is None:
        tokenizer = tokenizer_directory(options.base, options.adapters, plan.num_rows)
        directory = OutputDirectory(options.output, digest, inputs.identity())
        try:
            # Another merge may have finished before the lock was taken.
            existing = complete_manifest(options.output, digest)
        except BaseException:
            directory.close(keep=True)
            raise
        if existing is None:
            facts = {"plan_sha256": digest, "dtype": options.dtype}
            existing, result = _write(
                options, plan, directory, tokenizer, inputs, digests=digests, facts=facts, progress=progress
            )
        else:
            directory.close(keep=False)
    if result is None:
        remove_leftovers(options.output)
    figures = result or StreamResult()
    return MergeReport(
        output=options.output,
        plan_sha256=digest,
        num_tensors=len(plan.tensors),
        num_changed_tensors=sum(tensor.is_changed_by_adapter for tensor in plan.tensors),
        num_adapter_tensors=len(plan.adapter_tensors),
        bytes_read=figures.bytes_read,
        bytes_written=figures.bytes_written,
        bytes_resumed=figures.bytes_resumed,
        seconds=time.monotonic() - started,
        sha256={entry["name"]: entry["sha256"] for entry in existing["files"]},
        whole_tensors=tuple(figures.whole_tensors),
        was_complete=result is None,
        num_rows=plan.num_rows,
        left_out=tuple(others),
    )


def _write(
    options: MergeOptions,
    plan: MergePlan,
    directory: OutputDirectory,
    tokenizer: Path,
    inputs: MergeInputs,
    *,
    digests: dict[str, str],
    facts: Mapping[str, Any],
    progress: ProgressCallback | None,
) -> tuple[dict[str, Any], StreamResult]:
    """Write the output and rename it into place. Return its manifest, which includes `facts`, and the figures of the stream."""
    try:
        shards = directory.open_shards(plan)
        try:
            directory.copy_model_files(options.base, tokenizer, options.root_of, options.dtype, plan)
            result = stream(shards, directory.journal, progress)
        finally:
            for file in shards.values():
                file.close()
        # Imported here, so that copying bytes does not wait for torch.
        from finetune_trainer.merge.effect import has_effect

        if not has_effect({shard: file.path for shard, file in shards.items()}, read_checkpoint(options.base)):
            problem = "the merged model equals the base in every value: the adapter is untrained, or its changes are too small"
            if options.refuses_misfits:
                raise UnsupportedAdapterError(
                    f"{', '.join(map(str, options.adapters))}: {problem} for the element type.",
                    "give a trained adapter, a wider --dtype, or --force to merge anyway",
                )
            log.warning("%s for the element type", problem)
        inputs.require_unchanged(digests)
        manifest = directory.write_manifest(plan, result.sha256, facts)
        directory.publish()
    except BaseException as error:
        directory.close(keep=isinstance(error, StorageError) or not isinstance(error, MergeError))
        raise
    return manifest, result
