"""The checkpoint of another run with whose trained parameters this run starts. Imports no torch.

The two jobs may learn different things; only names and shapes of parameters must be equal. A checkpoint does not contain the base
model, so the user must make sure that both jobs have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune_trainer.checkpoint.manifest import Manifest
from finetune_trainer.context import RunContext
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import OutsideError, inside

START_FIELD = "spec.training.startFrom"
START_HINT = f"name a whole checkpoint of a job with the same base model and method as {START_FIELD}, or remove the field"


def start_directory(context: RunContext) -> Path | None:
    """Directory of that checkpoint; None: the run starts with the method's own values. Raises CheckpointError if links lead out
    of its claim.
    """
    location = context.plan.training.start_from
    if location is None:
        return None
    root = context.claims_root / location.claim
    try:
        return root / inside(context.path(location), root)
    except OutsideError as error:
        raise CheckpointError(f"{START_FIELD}: {error}", START_HINT) from error


def start_problem(
    directory: Path,
    manifest: Manifest,
    trained: Mapping[str, tuple[int, ...]],
    first_values: str | None = None,
    added_tokens: Sequence[str] | None = None,
) -> str:
    """Say why a run that trains parameters of these names and shapes cannot start from the checkpoint; empty if it can.

    first_values, added_tokens: as in Origin; None: not compared, because they are unknown or do not exist.
    """
    stored = {entry.name: tuple(entry.shape) for file in manifest.files for entry in file.pieces}
    other = sorted(stored.keys() ^ trained.keys())
    if other:
        has = "holds" if other[0] in stored else "lacks"
        return f"{directory} is of another model or method: it {has} {other[0]} ({len(other)} such names)"
    for name, shape in sorted(trained.items()):
        if stored[name] != tuple(shape):
            return f"{directory} is of another model or rank: {name} has shape {list(stored[name])} there, {list(shape)} here"
    if first_values is not None and manifest.origin.first_values != first_values:
        return f"{directory} was trained from other first values of the base model, which it does not hold"
    if added_tokens is not None and manifest.origin.added_tokens != [*added_tokens]:
        there, here = (", ".join(tokens) or "none" for tokens in (manifest.origin.added_tokens, added_tokens))
        return f"{directory} holds rows of other added tokens, or in another order: {there[:200]}; here {here[:200]}"
    return ""
