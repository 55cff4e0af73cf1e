"""What the rule book says about the manifest that comes to the settings of a pitfall."""

from __future__ import annotations

from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.rules.book import evaluate
from finetune_job.rules.context import RuleContext


def manifest(
    fsdp: dict[str, Any] | None = None, *, dtype: str | None = None, merge_base: str = "Original", **method: Any
) -> dict[str, Any]:
    """`spec` of a job with these FSDP settings and this method, on two ranks."""
    return {
        "model": {"source": "pvc://models/base", "dtype": dtype},
        "data": {"source": "pvc://data/train.jsonl"},
        "method": method,
        "training": {"maxSteps": 10},
        "parallelism": {"processesPerNode": 2, "fsdp": fsdp or {}},
        "merge": {"base": merge_base},
        "output": {"destination": "pvc://out/result"},
        "workspace": {"claimName": "workspace"},
    }


def findings(fsdp: dict[str, Any] | None = None, *, profile: FineTuneProfileSpec | None = None, **settings: Any) -> set[str]:
    """Ids of what is found in the job of `manifest`."""
    spec = FineTuneJobSpec.model_validate(manifest(fsdp, **settings))
    return {finding.rule for finding in evaluate(RuleContext(spec, profile))}
