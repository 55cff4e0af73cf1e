"""Reads the base and the adapters, plans their merge, identifies them by content, and detects changes to their files.

Only the headers of weights are read, except values that may be stored twice. The base's weights are identified by the headers,
ends, sizes and times of their files, because hashing them would take as long as the merge.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_job.methods import INSIDE_PEFT
from finetune_trainer.files import file_sha256
from finetune_trainer.merge.adapter_changes import with_saved_vocabulary
from finetune_trainer.merge.adapter_names import TOKENS_BASE, TOKENS_PART
from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.expressions import require_expressions_that_end
from finetune_trainer.merge.plan import MergePlan, merge_plan
from finetune_trainer.weights.errors import AdapterTensorError, BrokenCheckpointError, InputChangedError, UnsupportedAdapterError
from finetune_trainer.weights.headers import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    TensorHeader,
    read_adapter,
    read_checkpoint,
    read_json,
)
from finetune_trainer.weights.read_model import have_same_values, read_stored_model
from finetune_trainer.weights.stored import StoredModel

log = logging.getLogger(__name__)

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"

FINGERPRINT_BYTES = 64 << 10
"""Number of bytes at each end of every base shard that are hashed, to distinguish models of the same layout."""

MALFORMED_SETTING_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, re.error)
"""Errors that are raised if a setting does not have the expected type."""

_TRANSPOSED = {"lora_A.weight": "lora_embedding_B", "lora_B.weight": "lora_embedding_A"}
"""Part of an adapter on the output embeddings -> the part on the tied input embeddings that is its transpose."""
_ROWS = frozenset({TOKENS_PART, f"{TOKENS_BASE}.weight", "trainable_tokens_delta", "base_layer.weight"})
"""Endings of the names of adapter tensors, after the module's name, if the module has trained rows."""


def plan_merge(
    base: Path, adapters: Sequence[Path], dtype: str | None, max_shard_bytes: int, quantization: Quantization | None = None
) -> MergePlan:
    """Plan a merge from headers and configurations, which is fast enough for preflight. Raises MergeError.

    quantization: merge into the base as quantized in training with these settings; None: merge into the base as stored.
    """
    checkpoint, config = read_checkpoint(base), read_json(base / CONFIG_FILE)
    model = read_stored_model(checkpoint, config)
    quantized: dict[str, Quantization] = {}
    if quantization is not None:
        # This imports transformers, which takes more memory than the merge itself.
        from finetune_trainer.merge.quantized_base import quantized_tensors

        quantized = quantized_tensors(base, model, quantization)
    try:
        # This refuses files with too many rows before any values are compared.
        model = with_adapters_vocabulary(model, adapters)
        headers = [read_adapter_headers(adapter, model) for adapter in adapters]
        modules = {path.rpartition(".")[0] for path in model.parameters}
        for adapter_headers in headers:
            require_expressions_that_end(adapter_headers.config, modules)
        return merge_plan(
            base=checkpoint.tensors,
            base_config=config,
            model=model,
            adapters=headers,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            quantized=quantized,
        )
    except MALFORMED_SETTING_ERRORS as error:
        # The code expects the types that PEFT writes. A setting of another type fails where it is used.
        files = ", ".join(str(adapter / ADAPTER_CONFIG_FILE) for adapter in adapters)
        raise UnsupportedAdapterError(
            f"a value in {files} is of a kind that PEFT does not write ({type(error).__name__}: {str(error)[:300]}). "
            "Use the file that was saved with the adapter."
        ) from error


def with_adapters_vocabulary(model: StoredModel, adapters: Sequence[Path]) -> StoredModel:
    """Return the model with embeddings of the adapters' size. Raises what with_saved_vocabulary and read_adapter raise."""
    return with_saved_vocabulary(model, [read_adapter(adapter).tensors for adapter in adapters])


def tokenizer_directory(base: Path, adapters: Sequence[Path], num_rows: int | None) -> Path:
    """Return the directory that provides the merged model's tokenizer: the last adapter that has a tokenizer, else the base.

    num_rows: number of rows of enlarged embeddings; None: the embeddings are not enlarged. Enlarged embeddings mean that tokens
    were added, so a tokenizer with fewer tokens than the base's does not belong to this training. Raises UnsupportedAdapterError
    for a tokenizer with more tokens than rows.
    """
    files = (TOKENIZER_CONFIG_FILE, TOKENIZER_FILE)
    with_tokenizer = [adapter for adapter in reversed(adapters) if any((adapter / name).exists() for name in files)]
    if num_rows is None:
        return _fitting_tokenizer(base, with_tokenizer)
    known = num_tokens(base)
    for adapter in with_tokenizer:
        count = num_tokens(adapter)
        if count > num_rows:
            raise UnsupportedAdapterError(
                f"{adapter / TOKENIZER_FILE}: the tokenizer has {count} tokens, but the adapter's embeddings have {num_rows} "
                "rows: the model would fail on the other tokens. Use the tokenizer that the adapter was trained with."
            )
        if count >= known:
            return adapter
    log.warning(
        "the adapter's embeddings have %d rows, but no adapter's directory has a tokenizer with at least the base's %d tokens: "
        "the merged model gets the base's, which does not know the added tokens. Save the tokenizer with the adapter.",
        num_rows,
        known,
    )
    return base


def _fitting_tokenizer(base: Path, with_tokenizer: Sequence[Path]) -> Path:
    """Return the first directory whose tokenizer has no more tokens than the base's embeddings have rows, or else the base.

    A tokenizer has too many if a program added a padding token to it, but no row to the embeddings, before it saved the adapter.
    """
    config = read_json(base / CONFIG_FILE)
    sizes = [part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    rows = next((size for size in sizes if isinstance(size, int)), None)
    for adapter in with_tokenizer:
        count = num_tokens(adapter)
        if rows is None or count <= rows:
            return adapter
        log.warning(
            "%s: the tokenizer has %d tokens, and the model has embeddings for %d: it would fail on the others. The merged model "
            "gets the base's tokenizer. To keep the added tokens, train them with resized embeddings.",
            adapter,
            count,
            rows,
        )
    return base


def num_tokens(directory: Path) -> int:
    """Return the highest token id of the directory's tokenizer plus one; 0 if its files list no tokens. Raises MergeError.

    If a tokenizer has its own vocabulary format instead of tokenizer.json, only its added tokens are considered.
    """
    tokenizer, settings, added = (
        read_json(directory / name) if (directory / name).is_file() else {}
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, ADDED_TOKENS_FILE)
    )
    try:
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        ids = [*vocabulary.values()] if isinstance(vocabulary, Mapping) else [len(vocabulary) - 1]
        ids += (token["id"] for token in tokenizer.get("added_tokens") or ())
        ids += (int(number) for number in settings.get("added_tokens_decoder") or ())
        ids += added.values()
        return 1 + max((number for number in ids if isinstance(number, int)), default=-1)
    except MALFORMED_SETTING_ERRORS as error:
        raise BrokenCheckpointError(
            f"{directory}: the files of the tokenizer are malformed ({type(error).__name__}: {str(error)[:300]}). Save the "
            "tokenizer again."
        ) from error


def read_adapter_headers(directory: Path, model: StoredModel) -> AdapterHeaders:
    """Read an adapter's headers, leaving out copies of values that are stored elsewhere. model: the base. Raises MergeError."""
    config = read_json(directory / ADAPTER_CONFIG_FILE)
    tensors = _without_second_copies(read_adapter(directory).tensors)
    # PEFT also saves embeddings that were not trained. Copies of the base's values are left out.
    for tie in model.ties:
        stored = model.parameters[tie.source].parts[0].header
        for name in (f"{INSIDE_PEFT}{path}" for path in tie.paths):
            if name in tensors and have_same_values(tensors[name], stored):
                del tensors[name]
    return AdapterHeaders(tensors, config, frozenset(_copies(tensors, model, config)))


def _without_second_copies(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors with only one name, the plain one, for each parameter of a module that PEFT saves whole.

    With `save_embedding_layers`, or after a resize of the vocabulary, files hold embeddings as `<module>.weight`, again as
    `<module>.modules_to_save.weight`, and with the values from before training as `<module>.original_module.weight`. The same
    holds for biases if bias is "all". Raises AdapterTensorError if the first two differ.
    """
    kept = dict(tensors)
    for name, tensor in tensors.items():
        module, is_saved, part = name.rpartition(".modules_to_save.")
        if not is_saved:
            continue
        own = tensors.get(f"{module}.{part}")
        if own is not None and not have_same_values(tensor, own):
            raise AdapterTensorError(
                f"adapter tensors {own.name} and {name} are the same parameter, but their values differ. Save the adapter again."
            )
        del kept[name]
        kept[f"{module}.{part}"] = own or tensor
        kept.pop(f"{module}.original_module.{part}", None)
    return kept


def _copies(tensors: Mapping[str, TensorHeader], model: StoredModel, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors of each tied module whose adapter or saved values equal those of the module it is tied to.

    config: adapter_config.json. Unless it says that both modules were trained together, only whole parameters and trained rows of
    the same tokens are compared.
    """
    are_tied = bool(config.get("ensure_weight_tying"))
    indices = config.get("trainable_token_indices")
    are_same_rows = not isinstance(indices, Mapping) or len({tuple(rows) for rows in indices.values()}) == 1
    for tie in model.ties:
        first, *others = (f"{INSIDE_PEFT}{path.rpartition('.')[0]}." for path in tie.paths)
        for prefix in others:
            own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            is_compared = are_tied or own.keys() == {"weight"} or (are_same_rows and own.keys() <= _ROWS and len(own) > 1)
            originals = {part: tensors.get(first + _TRANSPOSED.get(part, part)) for part in own}
            if own and is_compared and all(_is_copy(tensor, originals[part], part) for part, tensor in own.items()):
                yield from (tensor.name for tensor in own.values())


def _is_copy(tensor: TensorHeader, original: TensorHeader | None, part: str) -> bool:
    if original is None or original.dtype != tensor.dtype:
        return False
    if part not in _TRANSPOSED:
        return have_same_values(tensor, original)
    # Imported here, so that a merge without this comparison does not wait for torch.
    import torch

    from finetune_trainer.merge.sources import Sources

    sources = Sources({tensor.file, original.file})
    try:
        return torch.equal(sources.tensor(tensor), sources.tensor(original).T)
    finally:
        sources.close()


@dataclass(frozen=True)
class MergeInputs:
    """The input files of a merge. Keys consist of role and name, such as `adapter-1/adapter_config.json`."""

    base_weights: dict[str, Path]
    others: dict[str, Path]
    states: dict[str, tuple[int, int]]
    """Size and modification time (in ns) of each file when the merge started."""

    @classmethod
    def of(cls, base: Path, adapters: Sequence[Path]) -> MergeInputs:
        """Return the files with their current sizes and modification times."""
        weights = {f"base/{name}": base / name for name in read_checkpoint(base).file_bytes}
        others = {f"base/{CONFIG_FILE}": base / CONFIG_FILE}
        for number, adapter in enumerate(adapters, start=1):
            files = (*read_adapter(adapter).file_bytes, ADAPTER_CONFIG_FILE)
            others |= {f"adapter-{number}/{name}": adapter / name for name in files}
        return cls(weights, others, {name: _state(path) for name, path in (weights | others).items()})

    def digests(self) -> dict[str, str]:
        """Return the inputs of the plan's digest: sha256 of both ends of the base's weight files, and of all other files."""
        return {name: _fingerprint(path) for name, path in self.base_weights.items()} | {
            name: file_sha256(path) for name, path in self.others.items()
        }

    def identity(self) -> dict[str, list[int]]:
        """Return `states` as JSON. A merge resumes an earlier one only if the states of both are equal."""
        return {name: list(state) for name, state in self.states.items()}

    def require_unchanged(self, digests: dict[str, str]) -> None:
        """Check that no file has changed since `of`. digests: from then. Raises InputChangedError, which names the file."""
        for name, path in (self.base_weights | self.others).items():
            try:
                is_same = _state(path) == self.states[name]
                is_same &= name not in self.base_weights or _fingerprint(path) == digests[name]
            except (OSError, BrokenCheckpointError) as error:
                raise InputChangedError(
                    f"{path} can no longer be read ({error}). Keep the inputs until the merge is done."
                ) from error
            if not is_same:
                raise InputChangedError(
                    f"{path}: changed while it was merged, so the result would mix two versions. It is discarded; merge again "
                    "when nothing writes to the inputs."
                )


def _state(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path}: the file is missing. Fetch or save it again.") from error
    except OSError as error:
        raise BrokenCheckpointError(f"{path} cannot be read ({error.strerror}). Fetch or save it again.") from error
    return status.st_size, status.st_mtime_ns


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - FINGERPRINT_BYTES))
        digest.update(file.read())
    digest.update(str(size).encode())
    return digest.hexdigest()
