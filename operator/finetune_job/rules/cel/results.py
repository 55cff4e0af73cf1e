"""Conditions on evaluation, merge, output and workspace, and on every path."""

from __future__ import annotations

from finetune_job.api.base import HUB_DATASETS
from finetune_job.rules import merging
from finetune_job.rules.cel.condition import Condition, within
from finetune_job.rules.rule import UNREADABLE

_HAS_HELD_OUT = "has(self.data.validation)"
_PATHS = ("model.source", "data.source", "data.datasets[].source", "data.validation.source", "output.destination")


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "early-stopping-without-evaluation",
        "",
        f"!has(self.evaluation.earlyStopping) || (has(self.evaluation.everySteps) && {_HAS_HELD_OUT})",
        "early stopping needs evaluation.everySteps and data.validation",
        "evaluation.earlyStopping",
    ),
    Condition(
        "best-model-without-validation",
        "",
        f"!self.evaluation.loadBestModelAtEnd || {_HAS_HELD_OUT}",
        "the best checkpoint is found on held-out records; set data.validation",
        "evaluation.loadBestModelAtEnd",
    ),
    Condition(
        "merge-into-quantized",
        "merge",
        "!self.enabled || self.base != 'Quantized'",
        "packing the sum again would round most of the update away; set base to Original",
        "base",
    ),
    Condition(
        "merge-while-sharded",
        "merge",
        "!self.enabled || self.base != 'Trained'",
        "a sharded model cannot be merged in place; set base to Original",
        "base",
    ),
    Condition(
        "merge-dequantized-without-qlora",
        "",
        "!self.merge.enabled || self.merge.base != 'Dequantized' || self.method.type == 'QLoRA'",
        "only QLoRA trains on packed weights; set base to Original",
        "merge.base",
    ),
    *within(merging.RANGES),
    Condition(
        "output-adapter-is-the-result",
        "",
        "self.output.adapter || self.merge.enabled || self.method.type == 'Full'",
        "nothing is merged, so the adapter is the result; remove output.adapter, or set merge.enabled to true",
        "output.adapter",
    ),
    Condition(
        "workspace-claim-or-template",
        "workspace",
        "has(self.claimName) != has(self.volumeClaimTemplate)",
        "set exactly one of claimName and volumeClaimTemplate",
    ),
    *(
        Condition(UNREADABLE, path, "!self.matches('/[.][.]?(/|$)')", "it leaves its root; write a path without '.' and '..'")
        for path in _PATHS
    ),
    *(
        Condition(
            UNREADABLE,
            path,
            f"!self.matches('^hf://{HUB_DATASETS}[^/]*/*$')",
            f"it names no data set; write hf://{HUB_DATASETS}<organisation>/<name>",
        )
        for path in _PATHS[:-1]
    ),
    Condition(
        UNREADABLE,
        _PATHS[-1],
        f"!self.startsWith('hf://{HUB_DATASETS}')",
        "it names a data set, and results are a model; write hf://<organisation>/<model>",
    ),
)
