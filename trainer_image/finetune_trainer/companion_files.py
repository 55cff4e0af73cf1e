"""Names the files that belong to a model besides its weights: settings, vocabularies, chat templates, licences and its own code.

The export of a fully fine-tuned model and the merge copy them to the new model. Fetching takes files of the same kinds.
"""

from __future__ import annotations

import re
from pathlib import Path

from finetune_job.layout import OutputLayout
from finetune_trainer.files import CODE_SUFFIX, MANIFEST_FILE, licence_files

SETTINGS_SUFFIXES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja"})
"""Suffixes of settings, vocabularies and chat templates. Records, logs, archives and pickles do not belong to a model."""
_RESULTS = OutputLayout(Path())
_OWN_RESULTS = frozenset({
    MANIFEST_FILE, _RESULTS.report_data.name, _RESULTS.verification.name, _RESULTS.provenance.name,
})  # fmt: skip
"""Results of this product that a base holds if it is a release itself. The new model has its own."""
_STALE = re.compile(
    # The configuration and the weight index, which are written with the new weights, and an adapter's configuration.
    r"config\.json|.*\.index\.json|adapter_config\.json"
    # State and metrics of a training run.
    r"|trainer_state\.json|(all|train|eval|predict)_results\.json"
    # How the base's weights were quantized; the new model's are not.
    r"|(hf_)?quant(ize|ization)?_config\.json"
    r"|readme.*",
    re.IGNORECASE,
)
"""Names of files that would be wrong next to the new weights."""


def companion_files(model: Path) -> list[Path]:
    """The files in a model's directory that belong to the model besides its weights and its config.json, in order of their names.

    Raises OSError.
    """
    terms = set(licence_files(model))
    return sorted(path for path in model.iterdir() if path in terms or (path.is_file() and _belongs(path)))


def _belongs(path: Path) -> bool:
    is_kind = path.suffix.lower() in SETTINGS_SUFFIXES or path.suffix == CODE_SUFFIX
    return is_kind and not path.name.startswith(".") and path.name not in _OWN_RESULTS and not _STALE.fullmatch(path.name)
