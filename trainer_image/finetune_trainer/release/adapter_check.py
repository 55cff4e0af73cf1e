"""The trained adapter is what was trained, in the layout that PEFT reads; checked on headers, before it is published.

Its bytes are proven by their digests, and its values were finite when they were written (train/export.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import MANIFEST_FILE
from finetune_trainer.release.serving import PEFT_PREFIX, ServingReport, serving_report
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, ADAPTER_FILE, read_header
from finetune_trainer.weights.rounding import READ_DTYPES

TENSORS_KEY = "tensors"
"""In the manifest of a trained adapter: element type and shape by name, as training knew them."""
_HINT = "delete it and train again: training resumes from the last checkpoint"


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """What the manifest says of tensors by name."""
    names = {dtype: name for name, dtype in READ_DTYPES.items()}
    return {name: {"dtype": names[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in sorted(tensors.items())}


def check_adapter(directory: Path, plan: RunPlan) -> ServingReport:
    """Names, shapes and element types are those that were trained, and PEFT finds the base; what engines make of it.

    Raises CheckpointError, BrokenCheckpointError.
    """
    header = read_header(directory / ADAPTER_FILE)
    found = {tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in header}
    settings = json.loads((directory / ADAPTER_CONFIG_FILE).read_bytes())
    trained = json.loads((directory / MANIFEST_FILE).read_bytes()).get(TENSORS_KEY, {})
    wrong = sorted(name for name in {*found, *trained} if found.get(name) != trained.get(name))
    if wrong or not found:
        raise CheckpointError(
            f"{directory / ADAPTER_FILE}: holds {len(found)} tensors, {len(trained)} were trained; first that differ: {wrong[:3]}",
            _HINT,
        )
    if strange := sorted(name for name in found if not name.startswith(PEFT_PREFIX)):
        raise CheckpointError(
            f"{directory / ADAPTER_FILE}: PEFT would not find {strange[:3]}: names begin with {PEFT_PREFIX}", _HINT
        )
    base = {"base_model_name_or_path": plan.model.name, "revision": plan.model.revision}
    for name, expected in base.items():
        if settings.get(name) != expected:
            raise CheckpointError(
                f"{directory / ADAPTER_CONFIG_FILE}: {name} is {settings.get(name)!r}, the plan has {expected!r}", _HINT
            )
    return serving_report(settings, {tensor.name: tensor.shape for tensor in header})
