"""What one adapter does to the parameters of the base model, of whatever method, and what holds for all methods.

lora.py and non_lora.py fill an AdapterChanges; resolve_changes.py lets those of several adapters follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune_job.api.method import ALL_LINEAR
from finetune_trainer.merge.adapter_names import ADAPTER_PREFIX
from finetune_trainer.merge.adapter_settings import AdapterHeaders, AdapterSettings
from finetune_trainer.merge.changes import Change
from finetune_trainer.merge.parameter_adapters import MatrixChange
from finetune_trainer.weights.errors import AdapterTensorMissingError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel


@dataclass
class AdapterChanges:
    """Changes and replacements by the model's own parameter paths."""

    changes: dict[str, list[Change]] = field(default_factory=dict)
    replacements: dict[str, TensorHeader] = field(default_factory=dict)
    """The adapter's tensors that parameters are replaced by, before the changes."""
    base_copies: set[str] = field(default_factory=set)
    """Paths whose replacement was not trained: it says what the base's values were in training."""
    matrices: list[MatrixChange] = field(default_factory=list)
    """Changes of single stored matrices: adapters on parameters that several stored tensors hold."""

    def add(self, path: str, change: Change) -> None:
        self.changes.setdefault(path, []).append(change)


def module_of(path: str) -> str:
    """The module that holds a parameter."""
    return path.rpartition(".")[0]


def apply_to_tied_copies(adapter: AdapterHeaders, model: StoredModel, result: AdapterChanges) -> None:
    """What is tied to the input embeddings and was trained as one with them is changed as they are."""
    for tie in model.ties:
        first, *others = tie.paths
        for path in others:
            if any(name.startswith(f"{ADAPTER_PREFIX}{module_of(path)}.") for name in adapter.copies):
                if first in result.changes:
                    result.changes[path] = list(result.changes[first])
                if first in result.replacements:
                    result.replacements[path] = result.replacements[first]


def require_all_targets(model: StoredModel, settings: AdapterSettings, adapted: set[str]) -> None:
    """A target without adapter tensors means that the save lost some (a rank's part under FSDP, say).

    adapted: paths of the weights that the adapter changes. Raises AdapterTensorMissingError naming the module.
    """
    if settings.target_modules == ALL_LINEAR:
        return
    dimensions = {path: len(parameter.shape) for path, parameter in model.parameters.items()}
    dimensions |= {path: 2 for tie in model.ties for path in tie.paths}
    for path, count in dimensions.items():
        module, _, name = path.rpartition(".")
        is_target = name == "weight" and count >= 2 and settings.targets(module)
        if is_target and path not in adapted and not model.is_extra(path):
            raise AdapterTensorMissingError(
                f"the adapter holds no tensor for {module}, although target_modules {settings.target_modules!r} covers it: the "
                "adapter was saved incompletely. Save it again from all ranks."
            )
