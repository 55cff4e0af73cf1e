"""Finds the other run's checkpoint whose trained parameters this run starts from. Does not import torch.

The two runs may learn different things, but their parameters must have the same names, shapes and meaning: the same base, method,
scaling, added tokens and first values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_job.method_settings import effective_settings
from finetune_trainer.checkpoint.manifest import Manifest, Origin
from finetune_trainer.context import RunContext
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import OutsideError, inside
from finetune_trainer.weights.base_identity import weights_digest
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import read_checkpoint

START_FIELD = "spec.training.startFrom"
START_HINT = f"name a whole checkpoint of a job with the same base model and method as {START_FIELD}, or remove the field"


_WITHOUT_MEANING = re.compile(r"ropout|^init|Modules$|^layers|^bias$")
"""Matches settings of methods that matter only in training, or that names and shapes of the parameters show."""


def start_directory(context: RunContext) -> Path | None:
    """Directory of the checkpoint in `startFrom`; None if unset. Raises CheckpointError if a link leads out of the claim."""
    location = context.plan.training.start_from
    if location is None:
        return None
    root = context.claims_root / location.claim
    try:
        return root / inside(context.path(location), root)
    except OutsideError as error:
        raise CheckpointError(f"{START_FIELD}: {error}", START_HINT) from error


def origin_of(context: RunContext, data_hash: str = "", first_values: str | None = None) -> Origin:
    """Return the origin that checkpoints of this run record."""
    method = context.plan.method
    settings: dict[str, Any] = {"type": method.type.value}
    if method.lora is not None:
        settings |= method.lora.model_dump(mode="json", include={"lora_alpha", "alpha_pattern", "use_rslora"})
        if method.lora.starts_from_base:
            settings["init_lora_weights"] = method.lora.init_lora_weights.value
    elif method.adapter is not None:
        effective = effective_settings(method.type, method.adapter.settings)
        settings |= {name: value for name, value in effective.items() if not _WITHOUT_MEANING.search(name)}
    return Origin(
        learning_sha256=context.learning_sha256,
        data_hash=data_hash,
        first_values=first_values,
        added_tokens=[token.content for token in context.plan.model.added_tokens],
        base_sha256=_base_digest(context.source_model),
        method=settings,
    )


def _base_digest(directory: Path) -> str | None:
    # The digest only serves a later start or merge, so a base that cannot be read in this way must not end the training.
    try:
        return weights_digest(read_checkpoint(directory))
    except (MergeError, OSError):
        return None


def start_problem(directory: Path, manifest: Manifest, trained: Mapping[str, tuple[int, ...]], origin: Origin) -> str:
    """Return the reason why a run with these trained parameters cannot start from the checkpoint; empty if it can.

    trained: name -> shape of each parameter. origin: this run's own.
    """
    stored = {entry.name: tuple(entry.shape) for file in manifest.files for entry in file.pieces}
    other = sorted(stored.keys() ^ trained.keys())
    if other:
        has = "holds" if other[0] in stored else "lacks"
        return f"{directory} is of another model or method: it {has} {other[0]} ({len(other)} such names)"
    for name, shape in sorted(trained.items()):
        if stored[name] != tuple(shape):
            return f"{directory} is of another model or rank: {name} has shape {list(stored[name])} there, {list(shape)} here"
    there = manifest.origin
    if there.added_tokens != origin.added_tokens:
        names = [(", ".join(tokens) or "none")[:200] for tokens in (there.added_tokens, origin.added_tokens)]
        return f"{directory} holds rows of other added tokens, or in another order: {names[0]}; here {names[1]}"
    if None not in (there.base_sha256, origin.base_sha256) and there.base_sha256 != origin.base_sha256:
        return f"{directory} was trained on another base model: the digests of the weights differ"
    # Checkpoints of earlier releases lack these settings, but record first values if these were subtracted from the base.
    if (there.first_values is not None) is not (origin.method.get("init_lora_weights") is not None):
        has = "from first values of the base model (PiSSA or OLoRA)" if there.first_values else "from zero"
        return f"{directory} was trained {has}, and spec.method.lora.initLoraWeights of this job says otherwise"
    own_method = origin.model_dump(mode="json")["method"]
    keys = sorted(there.method.keys() | own_method.keys()) if there.method else ()
    for key in keys:
        if (value := there.method.get(key)) != (own := own_method.get(key)):
            return f"{directory} was trained with {key} {value}, here it is {own}: its parameters would mean something else"
    return ""
