"""Parameters that share memory, above all input and output embeddings: kept together where adapters change them alike, else
parted.

In a model with an adapter each module has a change of its own, whatever memory the base's weights share: the logits are those of
the base's values with that module's change. PEFT's merge adds every change to the shared memory, so that each shows up in all
modules; here the modules are written apart where their changes differ (docs/decisions/0010-tied-weights.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_trainer.merge.changes import Change
from finetune_trainer.weights.errors import TiedWeightsError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel, Tie
from finetune_trainer.weights.tie_settings import tie_settings


@dataclass
class Edit:
    """What the adapters so far do to one parameter of the model."""

    source: TensorHeader | None = None
    """The adapter's tensor that replaces the parameter, before the changes."""
    changes: list[tuple[tuple[str, int] | None, Change]] = field(default_factory=list)
    """With the stored tensor and the matrix in it that is changed; None: every one."""
    source_adapter: int | None = None
    """Number of the adapter that trained `source`; None where it is a copy of the base."""
    last_adapter: int | None = None
    """Number of the last adapter that changed anything."""

    def is_like(self, other: Edit) -> bool:
        """Whether both make the same of the same values."""
        return (self.source, self.changes) == (other.source, other.changes)


@dataclass
class PartedTies:
    """Output tensors beyond those of the base."""

    added: dict[str, TensorHeader] = field(default_factory=dict)
    """The stored tensor that each shares its values with in the base."""
    sources: dict[str, str] = field(default_factory=dict)
    """The path of that tensor's parameter."""
    config_changes: dict[str, Any] = field(default_factory=dict)


def part_ties(edits: Mapping[str, Edit], model: StoredModel, config: Mapping[str, Any]) -> PartedTies:
    """Decide for each tie whether it holds. Raises TiedWeightsError where the model cannot be written apart."""
    result = PartedTies()
    for tie in model.ties:
        found = [edits.get(path, Edit()) for path in tie.paths]
        if all(edit.is_like(found[0]) for edit in found):
            continue
        _require_separable(tie, edits, model, config)
        for path in tie.paths:
            if path not in tie.stored:
                result.added[path] = model.parameters[tie.source].parts[0].header
                result.sources[path] = tie.source
        result.config_changes |= tie_settings(config, is_tied=False)
    return result


def _require_separable(tie: Tie, edits: Mapping[str, Edit], model: StoredModel, config: Mapping[str, Any]) -> None:
    """Only a decoder's input and output embeddings can be parted by saying so in config.json."""
    if len(tie.paths) == 2 and not model.family.always_tied and not config.get("is_encoder_decoder"):
        return
    changed = sorted(path for path in tie.paths if path in edits)
    reason = (
        "transformers ties parameters of this model type whatever config.json says"
        if model.family.always_tied
        else "config.json cannot say of these that they are separate"
    )
    raise TiedWeightsError(
        f"the adapter changes {', '.join(changed)} and not in the same way the others of {', '.join(tie.paths)}, which share their "
        f"memory: {reason}, so the merged model could not be written right. Drop these modules from target_modules, "
        "modules_to_save and trainable_token_indices, or train all of them alike with ensure_weight_tying: true."
    )
