"""The input directories as a plan: base and adapters are read, identified by content, and watched for changes.

Of weights only headers are read, except if an adapter claims to hold some values twice. Weights of the base are identified by
their files' headers, ends, sizes and times, because hashing them would take as long as the merge.
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
from finetune_trainer.weights.errors import (
    AdapterTensorDuplicateError,
    BrokenCheckpointError,
    InputChangedError,
    UnsupportedAdapterError,
)
from finetune_trainer.weights.headers import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
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
"""Bytes that are read from each end of every base shard to distinguish models of equal layout."""

MALFORMED_SETTING_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, re.error)
"""Errors from reading a setting of another type than expected."""

_TRANSPOSED = {"lora_A.weight": "lora_embedding_B", "lora_B.weight": "lora_embedding_A"}
"""Part on the output embeddings -> the part on the input embeddings of which it is the transpose."""
_ROWS = frozenset({TOKENS_PART, f"{TOKENS_BASE}.weight", "trainable_tokens_delta", "base_layer.weight"})
"""Parts of a module with trained rows."""


def plan_merge(
    base: Path, adapters: Sequence[Path], dtype: str | None, max_shard_bytes: int, quantization: Quantization | None = None
) -> MergePlan:
    """Plan a merge from headers and configurations only, which is cheap enough for preflight. Raises MergeError.

    quantization: merge into the base as a training with these settings saw it; None: into the base as stored.
    """
    checkpoint, config = read_checkpoint(base), read_json(base / CONFIG_FILE)
    model = read_stored_model(checkpoint, config)
    quantized: dict[str, Quantization] = {}
    if quantization is not None:
        # Imports transformers, which takes more memory than the merge itself, so only if it is needed.
        from finetune_trainer.merge.quantized_base import quantized_tensors

        quantized = quantized_tensors(base, model, quantization)
    try:
        # Checked before any values are compared, whose number is up to the adapter's file.
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
        # Settings are read as PEFT writes them; one of another type fails where it is used.
        files = ", ".join(str(adapter / ADAPTER_CONFIG_FILE) for adapter in adapters)
        raise UnsupportedAdapterError(
            f"{files}: holds a value of a kind that PEFT does not write ({type(error).__name__}: {str(error)[:300]}). "
            "Take the file that was saved with the adapter."
        ) from error


def with_adapters_vocabulary(model: StoredModel, adapters: Sequence[Path]) -> StoredModel:
    """The model with embeddings as large as in the adapters. Raises as `with_saved_vocabulary` and `read_adapter` do."""
    return with_saved_vocabulary(model, [read_adapter(adapter).tensors for adapter in adapters])


def tokenizer_directory(base: Path, adapters: Sequence[Path], num_rows: int | None) -> Path:
    """Directory of the merged model's tokenizer: the last adapter's that has one, else the base's.

    num_rows: of enlarged embeddings; then tokens were added, and an adapter's tokenizer with fewer tokens than the base's is not
    the one of this training. None: they are not enlarged. Raises UnsupportedAdapterError for a tokenizer whose tokens have no
    rows.
    """
    with_tokenizer = [adapter for adapter in reversed(adapters) if _has_tokenizer(adapter)]
    if num_rows is None:
        return next(iter(with_tokenizer), base)
    known = num_tokens(base)
    for adapter in with_tokenizer:
        count = num_tokens(adapter)
        if count > num_rows:
            raise UnsupportedAdapterError(
                f"{adapter / TOKENIZER_FILE}: the tokenizer has {count} tokens, but the adapter's embeddings have {num_rows} "
                "rows: the model would fail at the others. Give the tokenizer that the adapter was trained with."
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


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in (TOKENIZER_CONFIG_FILE, TOKENIZER_FILE))


def num_tokens(directory: Path) -> int:
    """Highest token id of the directory's tokenizer plus one; 0 if it names no tokens. Raises MergeError.

    Of a tokenizer with its own vocabulary format instead of tokenizer.json, only added tokens are known.
    """
    try:
        return 1 + max((number for number in _token_ids(directory) if isinstance(number, int)), default=-1)
    except MALFORMED_SETTING_ERRORS as error:
        raise BrokenCheckpointError(
            f"{directory}: its tokenizer's files hold something else than a tokenizer ({type(error).__name__}: "
            f"{str(error)[:300]}). Save the tokenizer again."
        ) from error


def _token_ids(directory: Path) -> Iterator[Any]:
    tokenizer, settings, added = (
        read_json(directory / name) if (directory / name).is_file() else {}
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, ADDED_TOKENS_FILE)
    )
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    yield from vocabulary.values() if isinstance(vocabulary, Mapping) else [len(vocabulary) - 1]
    yield from (token["id"] for token in tokenizer.get("added_tokens") or ())
    yield from (int(number) for number in settings.get("added_tokens_decoder") or ())
    yield from added.values()


def read_adapter_headers(directory: Path, model: StoredModel) -> AdapterHeaders:
    """Read an adapter. model: of the base. Raises BrokenCheckpointError, MergeError."""
    config = read_json(directory / ADAPTER_CONFIG_FILE)
    tensors = _without_second_copies(read_adapter(directory).tensors)
    for name in list(_unchanged(tensors, model)):
        del tensors[name]
    return AdapterHeaders(tensors, config, frozenset(_copies(tensors, model, config)))


def _without_second_copies(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Remove the further names that PEFT writes for a parameter of a module that it saves whole; its plain name stays.

    With `save_embedding_layers`, or after a resize of the vocabulary, files hold embeddings as `<module>.weight`, again as
    `<module>.modules_to_save.weight`, and with their values before the training as `<module>.original_module.weight`; with bias
    "all" also biases. Raises AdapterTensorDuplicateError for a copy that differs.
    """
    kept = dict(tensors)
    for name, tensor in tensors.items():
        module, is_saved, part = name.rpartition(".modules_to_save.")
        if not is_saved:
            continue
        own = tensors.get(f"{module}.{part}")
        if own is not None and not have_same_values(tensor, own):
            raise AdapterTensorDuplicateError(
                f"adapter tensors {own.name} and {name} are the same parameter, but differ. Save the adapter again."
            )
        del kept[name]
        kept[f"{module}.{part}"] = own or tensor
        kept.pop(f"{module}.original_module.{part}", None)
    return kept


def _copies(tensors: Mapping[str, TensorHeader], model: StoredModel, config: Mapping[str, Any]) -> Iterator[str]:
    """Names of tensors of modules that have the same adapter or the same saved values as the module that they are tied to.

    config: adapter_config.json. If it does not say that they were trained as one, only whole parameters and trained rows of the
    same tokens are compared.
    """
    are_tied = bool(config.get("ensure_weight_tying"))
    indices = config.get("trainable_token_indices")
    are_same_rows = not isinstance(indices, Mapping) or len({tuple(rows) for rows in indices.values()}) == 1
    for tie in model.ties:
        first, *others = (f"{INSIDE_PEFT}{path.rpartition('.')[0]}." for path in tie.paths)
        for prefix in others:
            own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            parts = {name.removeprefix(prefix) for name in own}
            is_asked = are_tied or parts == {"weight"} or (are_same_rows and parts <= _ROWS and len(parts) > 1)
            if own and is_asked and all(_is_copy(name, tensor, prefix, first, tensors) for name, tensor in own.items()):
                yield from (tensor.name for tensor in own.values())


def _unchanged(tensors: Mapping[str, TensorHeader], model: StoredModel) -> Iterator[str]:
    """Names of whole tied parameters with the base's own values: PEFT also saves embeddings that were not trained."""
    for tie in model.ties:
        stored = model.parameters[tie.source].parts[0].header
        for path in tie.paths:
            name = f"{INSIDE_PEFT}{path}"
            if name in tensors and have_same_values(tensors[name], stored):
                yield name


def _is_copy(name: str, tensor: TensorHeader, prefix: str, first: str, tensors: Mapping[str, TensorHeader]) -> bool:
    part = name.removeprefix(prefix)
    original = tensors.get(first + _TRANSPOSED.get(part, part))
    if original is None or original.dtype != tensor.dtype:
        return False
    return _are_transposes(tensor, original) if part in _TRANSPOSED else have_same_values(tensor, original)


def _are_transposes(first: TensorHeader, second: TensorHeader) -> bool:
    # Imported here, since merges without comparisons copy bytes before torch is imported.
    import torch

    from finetune_trainer.weights.rounding import TORCH_DTYPES

    values = []
    for tensor in (first, second):
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            data = bytearray(file.read(tensor.num_bytes))
        values.append(torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.dtype]).view(tensor.shape))
    return torch.equal(values[0], values[1].T)


@dataclass(frozen=True)
class MergeInputs:
    """The input files by role and name, such as `adapter-1/adapter_config.json`."""

    base_weights: dict[str, Path]
    others: dict[str, Path]
    states: dict[str, tuple[int, int]]
    """Size and time of last change in ns, as first seen."""

    @classmethod
    def of(cls, base: Path, adapters: Sequence[Path]) -> MergeInputs:
        """The files as they are now."""
        weights = {f"base/{name}": base / name for name in read_checkpoint(base).file_bytes}
        others = {f"base/{CONFIG_FILE}": base / CONFIG_FILE}
        for number, adapter in enumerate(adapters, start=1):
            others |= {f"adapter-{number}/{name}": adapter / name for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE)}
        return cls(weights, others, {name: _state(path) for name, path in (weights | others).items()})

    def digests(self) -> dict[str, str]:
        """Digests that enter the plan's digest: sha256 of the adapters' whole files and of the ends of the base's files."""
        return {name: _fingerprint(path) for name, path in self.base_weights.items()} | {
            name: file_sha256(path) for name, path in self.others.items()
        }

    def identity(self) -> dict[str, list[int]]:
        """`states` as JSON, which must be equal for a merge to continue an earlier one."""
        return {name: list(state) for name, state in self.states.items()}

    def require_unchanged(self, digests: dict[str, str]) -> None:
        """Check that no file has changed since `of`. digests: from then. Raises InputChangedError naming the file."""
        for name, path in (self.base_weights | self.others).items():
            try:
                is_same = _state(path) == self.states[name]
                is_same &= name not in self.base_weights or _fingerprint(path) == digests[name]
            except (OSError, BrokenCheckpointError) as error:
                raise InputChangedError(
                    f"{path}: cannot be read any more ({error}). Keep the inputs until the merge is done."
                ) from error
            if not is_same:
                raise InputChangedError(
                    f"{path}: was written to while it was merged, so that the result would be of neither. It is discarded; merge "
                    "again when nothing writes to the inputs."
                )


def _state(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path}: the file is missing. Fetch or save it again.") from error
    except OSError as error:
        raise BrokenCheckpointError(f"{path}: cannot be looked at ({error.strerror}). Fetch or save it again.") from error
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
