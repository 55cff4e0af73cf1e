"""Names the files that belong to a model besides its weights: settings, vocabularies, chat templates, licences and its own code.

Both the export of a fully fine-tuned model and the merge copy these files to the new model. Fetch takes files of the same kinds.
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
"""Files that this product adds to a release, so a base has them if it is a release itself. The new model gets its own."""
_STALE = re.compile(
    # The configuration and the weight index, which are written with the new weights, and an adapter's configuration.
    r"config\.json|.*\.index\.json|adapter_config\.json"
    # State and metrics of a training run.
    r"|trainer_state\.json|(all|train|eval|predict)_results\.json"
    # Quantization of the base's weights; the new model's weights are not quantized.
    r"|(hf_)?quant(ize|ization)?_config\.json"
    r"|readme.*",
    re.IGNORECASE,
)
"""Names of files that would be wrong next to the new weights."""


def companion_files(model: Path) -> list[Path]:
    """List the files in a model's directory that belong to the model, except weights and config.json, sorted by name.

    Raises OSError.
    """
    terms = set(licence_files(model))
    return sorted(path for path in model.iterdir() if path in terms or (path.is_file() and _belongs(path)))


def _belongs(path: Path) -> bool:
    is_kind = path.suffix.lower() in SETTINGS_SUFFIXES or path.suffix == CODE_SUFFIX
    return is_kind and not path.name.startswith(".") and path.name not in _OWN_RESULTS and not _STALE.fullmatch(path.name)
