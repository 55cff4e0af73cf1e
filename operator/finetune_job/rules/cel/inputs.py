"""Conditions on model and data."""

from __future__ import annotations

from finetune_job.api.base import HUB_DATASETS
from finetune_job.rules.cel.condition import Condition
from finetune_job.rules.data import WEIGHTS

_DATA = ("data.datasets[]", "data.validation")
"""Where records are named besides `data` itself, whose source counts only without datasets."""
_ONLY_SOURCE = "has(self.datasets) || !has(self.source) || "

_WHOLE_MODEL = "^hf://[^/]+/[^/]+/*$"
"""Of a source whose pattern has been checked; a data set of one word is no source."""


def _revision(at: str, guard: str) -> tuple[Condition, Condition]:
    return (
        Condition(
            "hub-source-without-revision",
            at,
            f"{guard}!self.source.startsWith('hf://') || has(self.revision)",
            "an hf:// source is read at a commit; set revision to its 40 digits",
        ),
        Condition(
            "revision-without-hub-source",
            at,
            f"{guard}self.source.startsWith('hf://') || !has(self.revision)",
            "only an hf:// source has a revision; remove revision",
        ),
    )


def _data_is_no_model(at: str, guard: str) -> Condition:
    return Condition(
        "data-source-is-model",
        at,
        f"{guard}!self.source.matches('{_WHOLE_MODEL}') || self.source.startsWith('hf://{HUB_DATASETS}')",
        f"hf:// without {HUB_DATASETS} names a model; write hf://{HUB_DATASETS}<organisation>/<name>",
    )


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "source-or-datasets",
        "data",
        "has(self.source) != has(self.datasets) && !(has(self.datasets) && has(self.revision))",
        "set exactly one of source and datasets; a revision belongs to its source",
    ),
    Condition(
        "chat-template-without-chat",
        "data",
        "!has(self.chatTemplate) || self.format == 'Chat'",
        "a chatTemplate renders records of format Chat; remove chatTemplate, or set format to Chat",
        "chatTemplate",
    ),
    Condition(
        "assistant-loss-without-chat",
        "data",
        "!has(self.lossOn) || self.lossOn != 'Assistant' || self.format == 'Chat'",
        "only records of format Chat have turns of an assistant; set lossOn to Completion or All",
        "lossOn",
    ),
    Condition(
        "completion-loss-on-text",
        "data",
        "!has(self.lossOn) || self.lossOn != 'Completion' || self.format != 'Text'",
        "records of format Text have no completion; set lossOn to All",
        "lossOn",
    ),
    Condition(
        "dataset-weight-range",
        "data.datasets[]",
        WEIGHTS.cel("self.weight"),
        f"weight must be {WEIGHTS}: the times that a record occurs in a pass",
        "weight",
    ),
    *_revision("data", _ONLY_SOURCE),
    _data_is_no_model("data", _ONLY_SOURCE),
    *(condition for at in _DATA for condition in (*_revision(at, ""), _data_is_no_model(at, ""))),
    *_revision("model", ""),
    Condition(
        "model-source-is-dataset",
        "model",
        f"!self.source.startsWith('hf://{HUB_DATASETS}')",
        f"hf://{HUB_DATASETS} names a data set; write hf://<organisation>/<model>",
        "source",
    ),
    Condition(
        "model-source-inside-repository",
        "model",
        f"!self.source.startsWith('hf://') || self.source.startsWith('hf://{HUB_DATASETS}') "
        f"|| self.source.matches('{_WHOLE_MODEL}')",
        "a model is a whole repository; write hf://<organisation>/<model>",
        "source",
    ),
)
