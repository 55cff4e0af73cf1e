"""Conditions on the inputs and results of a job: model, data, evaluation, merge, output, workspace, and all paths."""

from __future__ import annotations

from finetune_job.api.base import HUB_DATASETS
from finetune_job.finding import INVALID_FIELD
from finetune_job.methods import PACKING
from finetune_job.rules.cel.condition import CelCondition, cel_list, range_conditions
from finetune_job.rules.data import WEIGHTS

_DATA = ("data.datasets[]", "data.validation")
"""Paths that contain a source of records, apart from `data` itself, whose source is used only if there are no datasets."""
_ONLY_SOURCE = "has(self.datasets) || !has(self.source) || "

_WHOLE_MODEL = "^hf://[^/]+/[^/]+/*$"
"""Pattern of a whole model repository. The source's own pattern is checked elsewhere and excludes one-word data set names."""
_HAS_HELD_OUT = "has(self.data.validation)"
_PATHS = ("model.source", "data.source", "data.datasets[].source", "data.validation.source", "output.destination")


def _revision(at: str, guard: str) -> tuple[CelCondition, CelCondition]:
    return (
        CelCondition(
            "hub-source-without-revision",
            at,
            f"{guard}!self.source.startsWith('hf://') || has(self.revision)",
            "an hf:// source is read at a commit; set revision to its 40 digits",
        ),
        CelCondition(
            "revision-without-hub-source",
            at,
            f"{guard}self.source.startsWith('hf://') || !has(self.revision)",
            "only an hf:// source has a revision; remove revision",
        ),
    )


def _data_is_not_a_model(at: str, guard: str) -> CelCondition:
    return CelCondition(
        "data-source-is-model",
        at,
        f"{guard}!self.source.matches('{_WHOLE_MODEL}') || self.source.startsWith('hf://{HUB_DATASETS}')",
        f"hf:// without {HUB_DATASETS} names a model; write hf://{HUB_DATASETS}<organisation>/<name>",
    )


INPUT_CONDITIONS: tuple[CelCondition, ...] = (
    CelCondition(
        "source-or-datasets",
        "data",
        "has(self.source) != has(self.datasets) && !(has(self.datasets) && has(self.revision))",
        "set exactly one of source and datasets; a revision belongs to its source",
    ),
    CelCondition(
        "chat-template-without-chat",
        "data",
        "!has(self.chatTemplate) || self.format == 'Chat'",
        "a chatTemplate renders records of format Chat; remove chatTemplate, or set format to Chat",
        "chatTemplate",
    ),
    CelCondition(
        "assistant-loss-without-chat",
        "data",
        "!has(self.lossOn) || self.lossOn != 'Assistant' || self.format == 'Chat'",
        "only records of format Chat have turns of an assistant; set lossOn to Completion or All",
        "lossOn",
    ),
    CelCondition(
        "completion-loss-on-text",
        "data",
        "!has(self.lossOn) || self.lossOn != 'Completion' || self.format != 'Text'",
        "records of format Text have no completion; set lossOn to All",
        "lossOn",
    ),
    CelCondition(
        "dataset-weight-range",
        "data.datasets[]",
        WEIGHTS.cel("self.weight"),
        f"weight must be {WEIGHTS}: the times that a record occurs in a pass",
        "weight",
    ),
    *_revision("data", _ONLY_SOURCE),
    _data_is_not_a_model("data", _ONLY_SOURCE),
    *(condition for at in _DATA for condition in (*_revision(at, ""), _data_is_not_a_model(at, ""))),
    *_revision("model", ""),
    CelCondition(
        "hub-name-with-hub-source",
        "model",
        "!has(self.hubName) || !self.source.startsWith('hf://')",
        "an hf:// source names itself; remove hubName",
        "hubName",
    ),
    CelCondition(
        "model-source-is-dataset",
        "model",
        f"!self.source.startsWith('hf://{HUB_DATASETS}')",
        f"hf://{HUB_DATASETS} names a data set; write hf://<organisation>/<model>",
        "source",
    ),
    CelCondition(
        "model-source-inside-repository",
        "model",
        f"!self.source.startsWith('hf://') || self.source.startsWith('hf://{HUB_DATASETS}') "
        f"|| self.source.matches('{_WHOLE_MODEL}')",
        "a model is a whole repository; write hf://<organisation>/<model>",
        "source",
    ),
)


RESULT_CONDITIONS: tuple[CelCondition, ...] = (
    CelCondition(
        "early-stopping-without-evaluation",
        "",
        f"!has(self.evaluation.earlyStopping) || (has(self.evaluation.everySteps) && {_HAS_HELD_OUT})",
        "early stopping needs evaluation.everySteps and data.validation",
        "evaluation.earlyStopping",
    ),
    CelCondition(
        "best-model-without-validation",
        "",
        f"!self.evaluation.loadBestModelAtEnd || {_HAS_HELD_OUT}",
        "the best checkpoint is found on held-out records; set data.validation",
        "evaluation.loadBestModelAtEnd",
    ),
    CelCondition(
        "merge-into-quantized",
        "merge",
        "!self.enabled || self.base != 'Quantized'",
        "packing the sum again would round most of the update away; set base to Original",
        "base",
    ),
    CelCondition(
        "merge-while-sharded",
        "merge",
        "!self.enabled || self.base != 'Trained'",
        "a sharded model cannot be merged in place; set base to Original",
        "base",
    ),
    CelCondition(
        "merge-dequantized-without-qlora",
        "",
        f"!self.merge.enabled || self.merge.base != 'Dequantized' || self.method.type in {cel_list(PACKING)}",
        f"only {' and '.join(PACKING)} train on packed weights; set base to Original",
        "merge.base",
    ),
    *range_conditions("merging"),
    CelCondition(
        "output-adapter-is-the-result",
        "",
        "self.output.adapter || self.merge.enabled || self.method.type == 'Full'",
        "nothing is merged, so the adapter is the result; remove output.adapter, or set merge.enabled to true",
        "output.adapter",
    ),
    CelCondition(
        "workspace-claim-or-template",
        "workspace",
        "has(self.claimName) != has(self.volumeClaimTemplate)",
        "set exactly one of claimName and volumeClaimTemplate",
    ),
    *(
        CelCondition(
            INVALID_FIELD, path, "!self.matches('/[.][.]?(/|$)')", "it leaves its root; write a path without '.' and '..'"
        )
        for path in _PATHS
    ),
    *(
        CelCondition(
            INVALID_FIELD,
            path,
            f"!self.matches('^hf://{HUB_DATASETS}[^/]*/*$')",
            f"it names no data set; write hf://{HUB_DATASETS}<organisation>/<name>",
        )
        for path in _PATHS[:-1]
    ),
    CelCondition(
        INVALID_FIELD,
        _PATHS[-1],
        f"!self.startsWith('hf://{HUB_DATASETS}')",
        "it names a data set, and results are a model; write hf://<organisation>/<model>",
    ),
)
