"""What the rule book says about the manifest that comes to the settings of a pitfall."""

from __future__ import annotations

from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.rules.book import evaluate
from finetune_job.rules.context import RuleContext

REPRODUCED: dict[str, str] = {
    "wrap-class-list-empty": "test_wrapping",
    "wrap-class-name-blank": "test_wrapping",
    "wrap-class-name-malformed": "test_wrapping",
    "fsdp1-lora-mixed-requires-grad": "test_trainable",
    "fsdp1-trained-bias": "test_trainable",
    "fsdp1-dora-orig-params": "test_dora",
    "fsdp1-dora-mixed-precision": "test_dora",
    "dora-16-bit-magnitude": "test_dora",
    "quantization-bits": "test_quantization",
    "fsdp1-qlora-integer-storage": "test_quantization",
    "fsdp1-qlora-storage-not-model-dtype": "test_quantization",
    "qlora-storage-not-param-dtype": "test_quantization",
    "fsdp1-adapter-dtype": "test_dtypes",
    "fsdp1-qlora-compute-dtype": "test_dtypes",
    "fsdp2-trained-bias-dtype": "test_dtypes",
    "merge-into-quantized": "test_quantization",
    "merge-while-sharded": "test_merging",
    "local-state-dict": "test_checkpoints",
    "offload-without-gpu": "test_offload",
    "lora-dropout-range": "test_adapters",
    "all-linear-beside-names": "test_adapters",
    "module-name-malformed": "test_adapters",
    "module-adapted-and-saved": "test_adapters",
    "adapter-pattern-malformed": "test_adapters",
}
"""Rule -> module of this directory that shows its failure on the real libraries; tests/unit/rules compares it with the book."""


def findings(
    fsdp: dict[str, Any] | None = None,
    *,
    profile: FineTuneProfileSpec | None = None,
    dtype: str | None = None,
    merge_base: str = "Original",
    **method: Any,
) -> set[str]:
    """Ids of what is found in a job with these FSDP settings and this method."""
    spec = FineTuneJobSpec.model_validate(
        {
            "model": {"source": "pvc://models/base", "dtype": dtype},
            "data": {"source": "pvc://data/train.jsonl"},
            "method": method,
            "training": {"maxSteps": 10},
            "parallelism": {"processesPerNode": 2, "fsdp": fsdp or {}},
            "merge": {"base": merge_base},
            "output": {"destination": "pvc://out/result"},
            "workspace": {"claimName": "workspace"},
        }
    )
    return {finding.rule for finding in evaluate(RuleContext(spec, profile))}
