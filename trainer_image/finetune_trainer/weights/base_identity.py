"""Identifies the base of an adapter: by a digest that training writes next to the adapter, or else by the base's name."""

from __future__ import annotations

import hashlib
from itertools import groupby
from pathlib import Path

from finetune_trainer.files import MANIFEST_FILE, open_regular
from finetune_trainer.weights.errors import MergeError, UnsupportedAdapterError
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, CONFIG_FILE, Checkpoint, read_checkpoint, read_json

BASE_KEY = "base_sha256"
"""Key of the digest in the manifest of a trained adapter."""
SAMPLED_TENSORS = 1024
"""Maximum number of tensors whose values enter the digest."""
SAMPLED_BYTES = 4096
"""Number of bytes that are read at the beginning and at the end of each of these tensors."""


def weights_digest(checkpoint: Checkpoint) -> str:
    """Return a digest of a model's weights that does not depend on how they are divided into files.

    It covers every name, dtype and shape, but only a sample of the values, so that it takes no longer for a large model.
    """
    tensors = [tensor for _, tensor in sorted(checkpoint.tensors.items())]
    digest = hashlib.sha256(repr([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]).encode())
    sample = tensors[:: -(-len(tensors) // SAMPLED_TENSORS) or 1]
    values: dict[str, bytes] = {}
    for path, tensors_of_file in groupby(sorted(sample, key=lambda tensor: tensor.file), key=lambda tensor: tensor.file):
        with open_regular(path) as file:
            for tensor in tensors_of_file:
                size = min(SAMPLED_BYTES, tensor.num_bytes)
                # Rows that were filled later are the last ones of an embedding.
                for position in (0, tensor.num_bytes - size):
                    file.seek(tensor.offset + position)
                    values[tensor.name] = values.get(tensor.name, b"") + file.read(size)
    for tensor in sample:
        digest.update(values[tensor.name])
    return digest.hexdigest()


def require_base(base: Path, adapter: Path) -> None:
    """Raise UnsupportedAdapterError if the adapter records that it was trained on weights other than those of `base`."""
    recorded = _recorded(adapter)
    if recorded is not None and recorded != weights_digest(read_checkpoint(base)):
        raise UnsupportedAdapterError(
            f"{adapter} was trained on other weights than those in {base}: names, element types, shapes or values differ. "
            "Merged with these, the adapter would give a model that was never trained.",
            "give the base of the training, or --force to merge anyway",
        )


def base_doubt(base: Path, adapter: Path) -> str | None:
    """Return a warning if nothing shows that `base` is the model that adapter_config.json names as the adapter's base."""
    named = _named_base(adapter)
    if not named or _recorded(adapter) is not None:
        return None
    own = read_json(base / CONFIG_FILE).get("_name_or_path")
    # The Hub's cache has directories such as models--org--name/snapshots/<commit>.
    names = {part.rpartition("--")[2].lower() for part in (*base.absolute().parts, *base.resolve().parts, *Path(str(own)).parts)}
    if Path(named).name.lower() in names:
        return None
    return (
        f"{adapter / ADAPTER_CONFIG_FILE} names {named} as its base, and nothing shows that {base} is this model. If it is "
        "another one, even of the same shape, the merged model is wrong"
    )


def _recorded(adapter: Path) -> str | None:
    # Other tools may write files of this name, so a file that cannot be read counts as no record.
    try:
        recorded = read_json(adapter / MANIFEST_FILE).get(BASE_KEY)
    except (MergeError, OSError):
        return None
    return recorded if isinstance(recorded, str) else None


def _named_base(adapter: Path) -> str:
    named = read_json(adapter / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
    return named if isinstance(named, str) else ""
